"""From a plain function to a tool: strict arguments, errors that say what to do next, answers of bounded length."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult, TextContent, ToolAnnotations

from gradtracer.errors import (
    AmbiguousRun,
    BadParameter,
    CorruptJournal,
    GradtracerError,
    RunUnavailable,
    UnknownFix,
    UnknownIntervention,
    UnknownLayer,
    UnknownRun,
    UntrustedRunDirectory,
)
from gradtracer.records import DiagnosticReport, Document, Intervention
from gradtracer.workspace import Workspace

MAX_CHARACTERS = 20_000
"""Length of an answer's JSON; some 6,000 tokens, below every client's cut."""

D = TypeVar("D", bound=Document)

# For errors whose text does not already name a tool; the most specific class comes first.
_NEXT: tuple[tuple[type[GradtracerError], str], ...] = (
    (UnknownRun, "Call list_runs."),
    (AmbiguousRun, "Call list_runs and pass run_id."),
    (UnknownLayer, "Call get_layer_stats for the layers."),
    (UnknownFix, "Call list_fixes."),
    (UnknownIntervention, "Call get_run_status."),
    (BadParameter, "Correct it and call again; list_fixes shows the parameters of every fix."),
    (RunUnavailable, "Call get_run_status to see how the run stands."),
    (UntrustedRunDirectory, "Call list_runs for the runs that can be read."),
    (CorruptJournal, "Call list_runs for the other runs."),
    (GradtracerError, "Call list_runs."),
)


_NAMES_A_TOOL = re.compile(
    r"\b(list_runs|list_fixes|explain_failure|apply_autofix|revert_intervention|control_training|set_autofix_policy|"
    r"get_(run_status|health_events|metrics|layer_stats|intervention|report))\b"
)


@dataclass(frozen=True)
class ToolSpec:
    """One tool of the table in `mcp_server.tools`."""

    name: str
    function: Callable[..., Any]
    """Its first parameter is the Workspace; its return annotation is the document it answers with."""
    title: str
    annotations: ToolAnnotations
    writes: bool


def make_tool(spec: ToolSpec, workspace: Workspace) -> Tool:
    """The tool as the SDK serves it: bound to a workspace, unknown arguments refused, text equal to the structure."""
    signature = inspect.signature(spec.function, eval_str=True)
    _, *parameters = signature.parameters.values()
    function = spec.function

    if inspect.iscoroutinefunction(function):

        async def call_async(**arguments: Any) -> CallToolResult:
            try:
                return as_result(await function(workspace, **arguments))
            except GradtracerError as error:
                raise ToolError(explain(error)) from error

        bound: Callable[..., Any] = call_async
    else:

        def call(**arguments: Any) -> CallToolResult:
            try:
                return as_result(function(workspace, **arguments))
            except GradtracerError as error:
                raise ToolError(explain(error)) from error

        bound = call

    answer = Annotated[CallToolResult, signature.return_annotation]
    # The SDK reads signature and annotations, not the code, to build both schemas and to find the context parameter.
    bound.__name__ = spec.name
    bound.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": answer}
    setattr(bound, "__signature__", signature.replace(parameters=parameters, return_annotation=answer))  # noqa: B010

    tool = Tool.from_function(
        bound,
        name=spec.name,
        title=spec.title,
        description=inspect.getdoc(function),
        annotations=spec.annotations,
    )
    # The SDK ignores arguments that it does not know: a misspelt `mode` would silently be the default.
    model = tool.fn_metadata.arg_model
    model.model_config["extra"] = "forbid"
    model.model_rebuild(force=True)
    tool.parameters = model.model_json_schema(by_alias=True)
    return tool


def explain(error: GradtracerError) -> str:
    """The error's text, ending in the tool to call next where it names none."""
    text = str(error)
    if _NAMES_A_TOOL.search(text):
        return text
    return f"{text.rstrip('.')}. {next(step for cls, step in _NEXT if isinstance(error, cls))}"


def as_result(document: Document) -> CallToolResult:
    """The document as a tool result: structured, and the same as compact JSON text."""
    short = fit(document, lambda d: len(d.model_dump_json()))
    return CallToolResult(
        content=[TextContent(type="text", text=short.model_dump_json())],
        structured_content=short.model_dump(mode="json"),
    )


def fit(document: D, length: Callable[[D], int], limit: int = MAX_CHARACTERS) -> D:
    """The document, its longest lists cut at their ends until it is short enough, with a note of what was cut.

    Args:
        document: What to shorten; its lists are ordered by importance, or have a cursor, so that their ends matter
            least.
        length: The number of characters that it takes.
        limit: At most so many.
    """
    short, left, totals = document, document.model_dump(mode="json"), dict[str, int]()
    while (now := length(short)) > limit:
        # A list of one element is cut only where nothing else is left: what is inside it comes first.
        found = max(_lists(left), key=lambda f: (len(f[1]) > 1, len(json.dumps(f[1]))), default=None)
        if found is None:
            raise ToolError("The answer is too long to be given. Ask for less: fewer layers, signals or events.")
        path, values = found
        totals.setdefault(path, len(values))
        del values[min(len(values) - 1, int(len(values) * limit / now)) :]
        kept = {path: len(values) for path, values in _lists(left, empty=True) if path in totals}
        short = _noted(
            type(document).model_validate(left),
            tuple(
                f"{path}: {n} of {totals[path]} are shown; ask a narrower question for more."
                for path, n in kept.items()
            ),
        )
    return short


def _noted(document: D, notes: tuple[str, ...]) -> D:
    """The document with the notes where its kind has a place for them."""
    if isinstance(document, Intervention):
        return document.model_copy(update={"outcome": " ".join((document.outcome, *notes)).strip()})
    field = "notices" if isinstance(document, DiagnosticReport) else "left_out"
    return document.model_copy(update={field: (*getattr(document, field), *notes)})


def _lists(value: object, path: str = "", *, empty: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """All lists within a dumped document, with their paths."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if items or empty:
            yield path, items
        for i, item in enumerate(items):
            yield from _lists(item, f"{path}.{i}", empty=empty)
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            if key not in ("next_steps", "left_out"):
                yield from _lists(item, f"{path}.{key}" if path else key, empty=empty)
