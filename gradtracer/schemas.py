"""The published schemas: made from the models, committed under ``schemas/``, and held against what comes in.

``python -m gradtracer.schemas`` writes them, ``--check`` finds those that are stale. There is a JSON Schema (2020-12)
for each kind of document, ``report.xsd`` for the XML form of them all, and ``mcp_tools.json``, the tools of the server
as a client lists them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from lxml import etree
from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import WithDefaultSchema

from gradtracer import xml
from gradtracer.errors import InvalidDocument
from gradtracer.records import Document

COMMAND = "python -m gradtracer.schemas"
XSD_NAME = "report.xsd"
TOOLS_NAME = "mcp_tools.json"

CHECKOUT = Path(__file__).resolve().parents[1] / "schemas"
_INSTALLED = Path(__file__).resolve().with_name("_schemas")
# The server imports this package, so the way back is by name and only while schemas are written.
_TOOLS_MODULE = "mcp_server.tools"


class _Schema(GenerateJsonSchema):
    """The schema of what is written: every field is there, so there is nothing to say about defaults."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return True

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # "Run Id" for run_id tells a reader nothing


def documents() -> dict[str, type[Document]]:
    """The published kinds of documents, by kind.

    Raises:
        TypeError: If a document does not declare its `kind`, or declares another than its name in snake_case.
    """
    found: dict[str, type[Document]] = {}
    for model in _leaves(Document):
        if model.published and model.__module__.startswith("gradtracer.records."):
            kind = xml.root_name(model)
            if "kind" not in model.model_fields or model.model_fields["kind"].default != kind:
                raise TypeError(f'{model.__name__} must declare kind: Literal["{kind}"] = "{kind}"')
            found[kind] = model
    return dict(sorted(found.items()))


def _leaves(model: type[Document]) -> Iterator[type[Document]]:
    for subclass in model.__subclasses__():
        if subclass.__subclasses__():
            yield from _leaves(subclass)
        else:
            yield subclass


def json_schema(model: type[Document]) -> dict[str, Any]:
    """The JSON Schema of a document as it is written: every field is there."""
    schema = model.model_json_schema(mode="serialization", schema_generator=_Schema)
    kind = xml.root_name(model)
    head = {
        "$schema": Draft202012Validator.META_SCHEMA["$id"],
        "$id": f"{xml.NAMESPACE}:{kind}",
        "title": model.__name__,
    }
    return head | schema


def generate() -> dict[str, str]:
    """All schemas but that of the tools: text by file name."""
    found = {schema_name(kind): _dump(json_schema(model)) for kind, model in documents().items()}
    return found | {XSD_NAME: xml.xsd(documents().values())}


def schema_name(kind: str) -> str:
    """File name of the JSON Schema of a kind of document."""
    return f"{kind}.schema.json"


def _tools() -> dict[str, str]:
    tools: list[dict[str, Any]] = importlib.import_module(_TOOLS_MODULE).describe_tools()
    return {TOOLS_NAME: _dump(tools)}


def _dump(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def stale(directory: Path, expected: dict[str, str]) -> list[str]:
    """Names of files in a folder that are missing, differ from what is expected, or belong to nothing."""
    there = {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()} if directory.is_dir() else {}
    return sorted(name for name in {*there, *expected} if there.get(name) != expected.get(name))


def write(directory: Path, expected: dict[str, str]) -> list[str]:
    """Bring a folder up to date; the names of files that were written or removed are returned."""
    directory.mkdir(parents=True, exist_ok=True)
    changed = stale(directory, expected)
    for name in changed:
        if name in expected:
            (directory / name).write_text(expected[name], encoding="utf-8", newline="\n")
        else:
            (directory / name).unlink()
    return changed


def schema_path(name: str) -> Path:
    """A published schema, e.g. ``report.xsd``: in the installed package, or under ``schemas/`` in a checkout.

    Raises:
        FileNotFoundError: If there is none of this name.
    """
    for path in (_INSTALLED / name, CHECKOUT / name):
        if path.is_file():
            return path
    raise FileNotFoundError(f"no schema {name!r}: in a checkout, `{COMMAND}` writes it; else reinstall gradtracer-mcp")


def validate(text: str | bytes) -> Document:
    """Read a document in JSON or XML, and hold it against its published schema and its model.

    Args:
        text: The document; bytes are UTF-8. What it is, it says itself: `kind` in JSON, the root element in XML.

    Returns:
        The document, of the class of its kind.

    Raises:
        InvalidDocument: If it is not valid; the message says where and why.
    """
    if len(text) > xml.MAX_BYTES:
        raise InvalidDocument(f"expected at most {xml.MAX_BYTES} bytes, got {len(text)}")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidDocument(
                f"expected UTF-8, got {error.object[error.start]:#04x} at byte {error.start}"
            ) from error
    match text.lstrip()[:1]:
        case "<":
            return _validate_xml(text)
        case "{":
            return _validate_json(text)
        case start:
            raise InvalidDocument(
                f"expected JSON ('{{') or XML ('<'), got {f'{start!r} first' if start else 'nothing'}"
            )


def _validate_json(text: str) -> Document:
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise InvalidDocument(f"not well-formed JSON: {error}") from error
    model = _model(data.get("kind"), "$.kind")
    schema = json.loads(schema_path(schema_name(xml.root_name(model))).read_text(encoding="utf-8"))
    problem = best_match(Draft202012Validator(schema).iter_errors(data))
    if problem is not None:
        raise InvalidDocument(f"{problem.json_path}: {problem.message[:400]}")
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidDocument(f"$.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _validate_xml(text: str) -> Document:
    root = xml.parse(text)
    name = etree.QName(root).localname
    document = xml.read_tree(root, _model(name, f"/{name[:80]}"))
    schema = etree.XMLSchema(etree.fromstring(schema_path(XSD_NAME).read_bytes()))
    try:
        schema.assertValid(root)
    except etree.DocumentInvalid as error:
        raise InvalidDocument(f"the XML does not follow {XSD_NAME}: {error!s:.400}") from error
    return document


def _model(kind: object, where: str) -> type[Document]:
    known = documents()
    if not isinstance(kind, str) or kind not in known:
        raise InvalidDocument(f"{where}: expected a kind of document ({', '.join(known)}), got {kind!r:.100}")
    return known[kind]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON; a value that is not finite is null")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r:.100} comes twice in one object")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the schemas, or check them; 1 where a check finds a stale one."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Write the published schemas from the models.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is stale")
    parser.add_argument("--directory", type=Path, default=CHECKOUT, help="where they are (default: schemas/)")
    options = parser.parse_args(arguments)
    expected = generate() | _tools()
    if not options.check:
        for name in write(options.directory, expected):
            print(f"{'wrote' if name in expected else 'removed'} {options.directory / name}")
        return 0
    found = stale(options.directory, expected)
    for name in found:
        print(f"{options.directory / name} is stale", file=sys.stderr)
    if found:
        print(f"run: {COMMAND}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
