"""What a fix is: bounded parameters, a preview, an action at the step boundary, and its undo.

A fix is described without torch (server and CLI list fixes), so it imports torch inside `apply`, if at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast, get_args, runtime_checkable

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from gradtracer.errors import BadParameter, UnknownFix
from gradtracer.records import Change, FixInfo, ParameterInfo, ParameterScalar, Record, Safety
from gradtracer.registry import Registry, docstring_sections

FIXES: Registry[type[Fix[Any]]]

Undo = Callable[[], None]


@runtime_checkable
class ReportingUndo(Protocol):
    """An `Undo` that also tells what its fix has done since it was applied."""

    def __call__(self) -> None:
        """Take the fix back."""
        ...

    def report(self) -> str:
        """What it has done so far, in words that continue "it"; empty where that is nothing yet."""
        ...


class FixParameters(Record):
    """Parameters of a fix; each field has bounds and a description. This base has none."""


P = TypeVar("P", bound=FixParameters)


@dataclass(frozen=True)
class SnapshotInfo:
    """A saved state of the training."""

    name: str
    step: int
    healthy: bool
    """Whether no event of severity warning or above was open when it was taken."""


class LiveRun(Protocol):
    """What a fix may touch, in the training thread, at a step boundary."""

    @property
    def step(self) -> int:
        """The last finished step."""
        ...

    @property
    def model(self) -> Any:
        """The `torch.nn.Module`."""
        ...

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers seen so far."""
        ...

    @property
    def grad_scalers(self) -> Sequence[Any]:
        """The gradient scalers (`torch.amp.GradScaler`) that have scaled a loss so far."""
        ...

    def missing_parameters(self) -> Sequence[tuple[str, Any]]:
        """Names and parameters that require a gradient, have had one, and that no optimizer of the process holds.

        Those of the model come first, then those that it uses without having registered them, named after where they
        hang; the state of the run, as snapshots and trials keep it, holds these too from the first call on.
        """
        ...

    @property
    def num_held_batches(self) -> int:
        """How many captured batches `rehearse` can run on."""
        ...

    def rehearse(self, num_batches: int) -> int:
        """Run the forward pass of up to `num_batches` captured steps on the model as it stands now, without gradients.

        Forward hooks that the fix has placed see it. Modules stay in the mode they are in; random states and buffers
        are as before afterwards.

        Returns:
            How many were run.

        Raises:
            BadParameter: If no step could be captured that runs again; the message says what to pass to the tracker.
        """
        ...

    def around_update(self, before: Callable[[Any], None], after: Callable[[Any], None] | None = None) -> Undo:
        """Call `before(optimizer)` ahead of every optimizer step from now on, and `after(optimizer)` behind it.

        Gradients are final in `before`; it may change them in place, or leave the update out with `skip_update`.

        Returns:
            A callable that ends this.
        """
        ...

    def skip_update(self, optimizer: Any) -> None:
        """From inside a `before`: let this optimizer step do nothing."""
        ...

    def pruned_places(self) -> Mapping[str, Any]:
        """By name of layer, where its weight was set to zero when it was pruned: boolean tensors of its shape."""
        ...

    def any_rank(self, flag: bool) -> bool:
        """Whether a flag is set on any rank of a distributed training.

        From inside a `before` only, and in every call of it: all ranks ask together.
        """
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds only a part of the parameters, the rest being on other ranks."""
        ...

    def snapshots(self) -> Sequence[SnapshotInfo]:
        """Saved states, oldest first."""
        ...

    def snapshot_before_trouble(self) -> SnapshotInfo | None:
        """The newest snapshot from before the first open problem, of a state that was still well; None without one."""
        ...

    def take_snapshot(self) -> SnapshotInfo | None:
        """Save the state as it is now; None where it holds a non-finite number."""
        ...

    def restore(self, snapshot: str) -> None:
        """Put model, optimizers and random state back to a snapshot, bit for bit."""
        ...

    def first_open_problem_step(self) -> int | None:
        """First step of the oldest open event of severity warning or above."""
        ...


class Fix(ABC, Generic[P]):
    """A repair of a live run; stateless.

    The docstring of a subclass is its page: a summary line and the sections What, Why, Definition, Safety, Undo and
    References.
    """

    code: ClassVar[str]
    """Name of the fix and of its file: what it does."""
    title: ClassVar[str]
    safety: ClassVar[Safety]
    standing: ClassVar[bool] = False
    """Whether it stays in force until reverted."""
    changes_function: ClassVar[bool] = False
    """Whether the model computes another function while it is in force: then a saved model needs it too."""
    shows_in_loss: ClassVar[bool] = True
    """Whether its effect shows in the training loss within some steps. Where it does not (a mask, a running statistic),
    a trial can show that it does no harm, and no more."""
    loss_may_rise: ClassVar[bool] = False
    """Whether it mends what the training loss does not count, at the cost of that loss (weights of classes, a mask).
    Then a trial and the watch ask only that the loss stays finite."""
    works_sharded: ClassVar[bool] = False
    """Whether it can be used where parameters are sharded over ranks (`fully_shard`): it reads and writes no parameter
    and no optimizer state, or only through operations that hold for the whole of them; others are refused there."""
    num_batches: ClassVar[int] = 0
    """How many captured batches `apply` wants for `LiveRun.rehearse`; the run captures them before it is called."""
    mends: ClassVar[tuple[str, ...]]
    """Codes of the causes that it mends."""
    Parameters: ClassVar[type[FixParameters]] = FixParameters

    @abstractmethod
    def preview(self, run: LiveRun, parameters: P) -> list[Change]:
        """What `apply` would change, old and new values.

        Raises:
            BadParameter: If it cannot be applied to this run with these parameters.
        """

    @abstractmethod
    def apply(self, run: LiveRun, parameters: P) -> Undo:
        """Do it.

        Returns:
            A callable that takes it back.

        Raises:
            BadParameter: As `preview`; then nothing was changed.
        """

    def parse(self, parameters: Mapping[str, object]) -> P:
        """Check parameters as they arrive from outside.

        Raises:
            BadParameter: If one is unknown, missing, of the wrong type or out of bounds.
        """
        try:
            return cast(P, self.Parameters.model_validate(dict(parameters), strict=False))
        except ValidationError as error:
            problems = [
                f"{'.'.join(str(p) for p in e['loc']) or 'parameters'}: {e['msg']} (got {e['input']!r})"[:300]
                for e in error.errors(include_url=False)
            ]
            takes = "; ".join(map(_describe, self.info().parameters)) or "nothing"
            raise BadParameter(f"{self.code} refused: {'; '.join(problems)}. It takes {takes}") from error

    @classmethod
    def info(cls) -> FixInfo:
        """The fix as an agent sees it."""
        sections = docstring_sections(cls)
        return FixInfo(
            code=cls.code,
            title=cls.title,
            description=" ".join((sections[""] + "\n" + sections.get("What", "")).split()),
            safety=cls.safety,
            standing=cls.standing,
            changes_function=cls.changes_function,
            parameters=tuple(_parameter_info(n, f) for n, f in cls.Parameters.model_fields.items()),
            mends=cls.mends,
        )


def get_fix(code: str) -> Fix[Any]:
    """An instance of the fix.

    Raises:
        UnknownFix: If there is none of this code.
    """
    if code not in FIXES:
        raise UnknownFix(f"no fix {code[:80]!r}; list_fixes shows them: {', '.join(FIXES.codes)}")
    return FIXES[code]()


_TYPES: dict[type, Any] = {float: "number", int: "integer", bool: "boolean", str: "string"}


def _parameter_info(name: str, field: FieldInfo) -> ParameterInfo:
    annotation = next((a for a in get_args(field.annotation) if a is not type(None)), field.annotation)
    bounds: dict[str, float] = {}
    for item in field.metadata:
        if isinstance(item, annotated_types.Ge):
            bounds["minimum"] = float(cast(float, item.ge))
        elif isinstance(item, annotated_types.Le):
            bounds["maximum"] = float(cast(float, item.le))
        elif isinstance(item, annotated_types.Gt):
            bounds["exclusive_minimum"] = float(cast(float, item.gt))
    return ParameterInfo(
        name=name,
        type=_TYPES[cast(type, annotation)],
        description=field.description or "",
        default=None if field.is_required() else cast(ParameterScalar, field.default),
        required=field.is_required(),
        minimum=bounds.get("minimum"),
        maximum=bounds.get("maximum"),
        exclusive_minimum=bounds.get("exclusive_minimum"),
    )


def _describe(p: ParameterInfo) -> str:
    low = f"> {p.exclusive_minimum:g}" if p.exclusive_minimum is not None else None
    low = f">= {p.minimum:g}" if p.minimum is not None else low
    high = f"<= {p.maximum:g}" if p.maximum is not None else None
    bounds = ", ".join(b for b in (low, high) if b)
    return f"{p.name} ({p.type}{', ' + bounds if bounds else ''}{', required' if p.required else ''})"


FIXES = Registry("fix")
