"""Documents as XML, element for element with their JSON, exact in both directions, and the XSD that describes them.

The root is named by the document's `kind`, a field is an element of its name, an item of a list is an `item` inside
it. Null is ``xsi:nil="true"``, so it differs from an empty text and an empty list. Where a value may be of several
types, ``xsi:type`` says which: ``xs:boolean``, ``xs:integer``, ``xs:double``, ``xs:string``, or the name of a record.
Every field is written, in the order of the model, in the namespace of the schema version.

XML from outside is read with entities, DTDs and the network off; a DOCTYPE is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice
from typing import Any, NoReturn, TypeVar

from annotated_types import Ge, Gt, Le
from lxml import etree
from pydantic import BaseModel, ValidationError

from gradtracer.errors import InvalidDocument
from gradtracer.records import Document
from gradtracer.shapes import AnyAtom, AnyNested, Atom, Bound, Items, Nested, OneOf, Slot, fields

NAMESPACE = "urn:gradtracer:records:1"
MAX_BYTES = 32 << 20
# A parsed element takes some 120 bytes however short it was written, so the tags are bounded too; a document of ours
# has one in about 16 bytes.
MAX_TAGS = 2_000_000

_XSI = "http://www.w3.org/2001/XMLSchema-instance"
_XS = "http://www.w3.org/2001/XMLSchema"
_PREFIXES: Any = {None: NAMESPACE, "xs": _XS, "xsi": _XSI}
_NIL, _TYPE, _SCHEMA_LOCATION = f"{{{_XSI}}}nil", f"{{{_XSI}}}type", f"{{{_XSI}}}schemaLocation"
_XS_NAMES: dict[type, str] = {bool: "boolean", int: "integer", float: "double", str: "string"}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_INTEGER = re.compile(r"[+-]?[0-9]+")
_DOUBLE = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WHITESPACE = " \t\r\n"

D = TypeVar("D", bound=Document)


def root_name(model: type[Document]) -> str:
    """Name of the document's root element and value of its `kind`: the class name in snake_case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", model.__name__).lower()


# --- writing ----------------------------------------------------------------------------------------------------------


def to_xml(document: Document) -> str:
    """The document as XML, indented, without an XML declaration: encode it as UTF-8.

    Raises:
        InvalidDocument: If a text holds a character that XML cannot express; clean text (`records.clean`) holds none.
    """
    root = etree.Element(f"{{{NAMESPACE}}}{root_name(type(document))}", nsmap=_PREFIXES)
    _write_fields(root, document)
    etree.indent(root, space=" ")
    return etree.tostring(root, encoding="unicode") + "\n"


def _write_fields(parent: etree._Element, record: BaseModel) -> None:
    for name, slot in fields(type(record)).items():
        _write(etree.SubElement(parent, f"{{{NAMESPACE}}}{name}"), getattr(record, name), slot)


def _write(element: etree._Element, value: Any, slot: Slot) -> None:
    if value is None:
        element.set(_NIL, "true")
        return
    match slot.shape:
        case Atom() | OneOf():
            _write_text(element, value)
        case AnyAtom():
            element.set(_TYPE, f"xs:{_XS_NAMES[type(value)]}")
            _write_text(element, value)
        case Items(item):
            for each in value:
                _write(etree.SubElement(element, f"{{{NAMESPACE}}}item"), each, item)
        case Nested():
            _write_fields(element, value)
        case AnyNested():
            element.set(_TYPE, type(value).__name__)
            _write_fields(element, value)


def _write_text(element: etree._Element, value: bool | int | float | str | Enum) -> None:
    match value:
        case bool():
            element.text = "true" if value else "false"
        case Enum():
            element.text = value.value
        case float():
            # repr is the shortest text that reads back as the same float.
            element.text = repr(value)
        case _:
            try:
                element.text = str(value)
            except ValueError as error:
                field = etree.QName(element).localname
                raise InvalidDocument(f"field {field}: {value!r:.200} cannot stand in XML ({error})") from error


# --- reading ----------------------------------------------------------------------------------------------------------


def from_xml(text: str | bytes, model: type[D]) -> D:
    """Read what `to_xml` wrote.

    Args:
        text: The XML; bytes are UTF-8.
        model: The class of document that is expected.

    Raises:
        InvalidDocument: If it is not well-formed, too large, holds a DOCTYPE, or is not a whole document of this class.
    """
    return read_tree(parse(text), model)


def parse(text: str | bytes) -> etree._Element:
    """The root element of XML from outside, without comments and processing instructions.

    Raises:
        InvalidDocument: If it is not well-formed, larger than `MAX_BYTES`, deeper than 256 elements, or holds
            more than `MAX_TAGS` tags or a DOCTYPE.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > MAX_BYTES:
        raise InvalidDocument(f"expected at most {MAX_BYTES} bytes of XML, got {len(data)}")
    if (num_tags := data.count(b"<")) > MAX_TAGS:
        raise InvalidDocument(f"expected at most {MAX_TAGS} tags of XML, got {num_tags}")
    parser = etree.XMLParser(
        # The encoding is set so that a declaration cannot choose another than the one that was checked.
        encoding="utf-8",
        resolve_entities=False,
        load_dtd=False,
        no_network=True,
        huge_tree=False,
        remove_comments=True,
        remove_pis=True,
    )
    try:
        root = etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        raise InvalidDocument(f"not well-formed XML: {error.msg}") from error
    # Internal and external entities are declared in a DOCTYPE and nowhere else; nothing has expanded them so far.
    if root.getroottree().docinfo.internalDTD is not None:
        raise InvalidDocument("the XML holds a DOCTYPE, which no document of ours does; remove it")
    return root


def read_tree(root: etree._Element, model: type[D]) -> D:
    """`from_xml` for a tree that `parse` returned.

    Raises:
        InvalidDocument: If it is not a whole document of this class.
    """
    name = root_name(model)
    if root.tag != f"{{{NAMESPACE}}}{name}":
        _fail(root, f"/{_local(root)}", f"the element <{name}> in the namespace {NAMESPACE}", _describe(root))
    _check_attributes(root, f"/{name}", {_SCHEMA_LOCATION})
    data = _read_fields(root, model, f"/{name}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        element, path = _locate(root, f"/{name}", problem["loc"])
        raise InvalidDocument(f"line {element.sourceline}, {path}: {problem['msg']}") from error


def _read_fields(parent: etree._Element, model: type[BaseModel], path: str) -> dict[str, Any]:
    slots = fields(model)
    children = list(islice(parent, len(slots) + 1))
    _check_no_text(parent, children, path)
    for child, name in zip(children, slots, strict=False):
        if child.tag != f"{{{NAMESPACE}}}{name}":
            _fail(child, path, f"<{name}> here", f"{_describe(child)}; every field is written, in order")
    if len(children) > len(slots):
        _fail(children[len(slots)], path, "no further element", _describe(children[len(slots)]))
    if len(children) < len(slots):
        missing = list(slots)[len(children)]
        _fail(parent, path, f"<{missing}>", "the end of the element; every field is written, in order")
    return {n: _read(c, s, f"{path}/{n}") for c, (n, s) in zip(children, slots.items(), strict=True)}


def _read(element: etree._Element, slot: Slot, path: str) -> Any:
    shape = slot.shape
    typed = isinstance(shape, AnyAtom | AnyNested)
    _check_attributes(element, path, {_NIL if slot.nullable else "", _TYPE if typed else ""})
    if (nil := element.get(_NIL)) is not None:
        if nil.strip(_WHITESPACE) not in _BOOLEANS:
            _fail(element, path, "xsi:nil to be true or false", repr(nil))
        if _BOOLEANS[nil.strip(_WHITESPACE)]:
            if len(element) or element.text:
                _fail(element, path, "nothing inside an element with xsi:nil", "content")
            return None
    match shape:
        case Atom():
            return _read_atom(element, shape.type, path)
        case OneOf(values):
            text = _leaf(element, path)
            if text not in values:
                _fail(element, path, f"one of {', '.join(values)}", repr(text))
            return text
        case AnyAtom(atoms):
            known = {(_XS, _XS_NAMES[a.type]): a.type for a in atoms}
            return _read_atom(element, _typed(element, known, path), path)
        case Items(item):
            _check_no_text(element, element, path)
            for child in element:
                if child.tag != f"{{{NAMESPACE}}}item":
                    _fail(child, path, "<item>", _describe(child))
            return tuple(_read(c, item, f"{path}/item[{i}]") for i, c in enumerate(element, start=1))
        case Nested(model):
            return _read_fields(element, model, path)
        case AnyNested(models):
            return _read_fields(element, _typed(element, {(NAMESPACE, m.__name__): m for m in models}, path), path)


T = TypeVar("T")


def _typed(element: etree._Element, known: dict[tuple[str, str], T], path: str) -> T:
    written = element.get(_TYPE)
    prefix, _, local = (written or "").strip(_WHITESPACE).rpartition(":")
    found = known.get((element.nsmap.get(prefix or None, ""), local))
    if found is None:
        _fail(element, path, f"xsi:type to be one of {', '.join(n for _, n in known)}", repr(written))
    return found


def _read_atom(element: etree._Element, kind: type, path: str) -> bool | int | float | str:
    text = _leaf(element, path)
    if kind is str:
        return text
    token = text.strip(_WHITESPACE)
    if kind is bool:
        if token in _BOOLEANS:
            return _BOOLEANS[token]
    elif (_INTEGER if kind is int else _DOUBLE).fullmatch(token):
        try:
            return kind(token)
        except ValueError as error:  # more digits than Python converts
            raise InvalidDocument(f"line {element.sourceline}, {path}: {error}") from error
    _fail(element, path, f"a value of xs:{_XS_NAMES[kind]}, finite", repr(text[:80]))


def _leaf(element: etree._Element, path: str) -> str:
    if len(element):
        _fail(element, path, "text only", _describe(element[0]))
    return element.text or ""


def _check_no_text(element: etree._Element, children: Iterable[etree._Element], path: str) -> None:
    for text in (element.text, *(child.tail for child in children)):
        if text and text.strip(_WHITESPACE):
            _fail(element, path, "elements only", repr(text.strip(_WHITESPACE)[:80]))


def _check_attributes(element: etree._Element, path: str, allowed: Iterable[str]) -> None:
    for name in map(str, element.attrib):
        if name not in allowed:
            _fail(element, path, "no further attribute", repr(name[:200]))


def _locate(root: etree._Element, path: str, loc: Sequence[int | str]) -> tuple[etree._Element, str]:
    """The element that a location of pydantic points at; what names no element (the branch of a union) is passed."""
    element = root
    for part in loc:
        if isinstance(part, int):
            element, path = element[part], f"{path}/item[{part + 1}]"
        elif (child := element.find(f"{{{NAMESPACE}}}{part}")) is not None:
            element, path = child, f"{path}/{part}"
    return element, path


def _local(element: etree._Element) -> str:
    return etree.QName(element).localname[:80]


def _describe(element: etree._Element) -> str:
    name = etree.QName(element)
    return f"<{name.localname[:80]}>" + (
        "" if name.namespace == NAMESPACE else f" in {(name.namespace or 'no namespace')[:80]}"
    )


def _fail(element: etree._Element, path: str, expected: str, got: str) -> NoReturn:
    raise InvalidDocument(f"line {element.sourceline}, {path}: expected {expected}, got {got}")


# --- schema -----------------------------------------------------------------------------------------------------------


def xsd(documents: Iterable[type[Document]]) -> str:
    """The XML Schema 1.0 of these documents: what `to_xml` writes and `from_xml` reads."""
    root = etree.Element(
        _xs("schema"),
        {"targetNamespace": NAMESPACE, "elementFormDefault": "qualified"},
        nsmap=_PREFIXES,
    )
    number = _restriction(root, "xs:double", name="finite")
    etree.SubElement(number, _xs("pattern"), value=_DOUBLE.pattern)
    declared: set[type[BaseModel]] = set()
    for model in documents:
        etree.SubElement(root, _xs("element"), name=root_name(model), type=model.__name__)
        _declare(root, model, declared)
    etree.indent(root, space="  ")
    return etree.tostring(root, encoding="UTF-8", xml_declaration=True).decode() + "\n"


def _declare(root: etree._Element, model: type[BaseModel], declared: set[type[BaseModel]]) -> None:
    if model in declared:
        return
    declared.add(model)
    slots = fields(model)
    needed: list[type[BaseModel]] = []
    complex_type = etree.SubElement(root, _xs("complexType"), name=model.__name__)
    _annotate(complex_type, model.__doc__)
    sequence = etree.SubElement(complex_type, _xs("sequence"))
    for name, slot in slots.items():
        element = etree.SubElement(sequence, _xs("element"), name=name)
        _annotate(element, model.model_fields[name].description)
        needed += _declare_type(element, slot)
    for each in needed:
        _declare(root, each, declared)


def _declare_type(element: etree._Element, slot: Slot) -> list[type[BaseModel]]:
    """Give a declared element its type; the records that it needs are returned."""
    if slot.nullable:
        element.set("nillable", "true")
    match slot.shape:
        case Atom(kind, bounds):
            name = "finite" if kind is float else f"xs:{_XS_NAMES[kind]}"
            if bounds:
                restriction = _restriction(element, name)
                for bound in bounds:
                    facet, value = _facet(bound)
                    etree.SubElement(restriction, _xs(facet), value=value)
            else:
                element.set("type", name)
        case OneOf(values):
            restriction = _restriction(element, "xs:string")
            for value in values:
                etree.SubElement(restriction, _xs("enumeration"), value=value)
        case AnyAtom(atoms):
            simple = etree.SubElement(element, _xs("simpleType"))
            etree.SubElement(simple, _xs("union"), memberTypes=" ".join(f"xs:{_XS_NAMES[a.type]}" for a in atoms))
        case Items(item):
            complex_type = etree.SubElement(element, _xs("complexType"))
            sequence = etree.SubElement(complex_type, _xs("sequence"))
            each = etree.SubElement(sequence, _xs("element"), name="item", minOccurs="0", maxOccurs="unbounded")
            return _declare_type(each, item)
        case Nested(model):
            element.set("type", model.__name__)
            return [model]
        case AnyNested(models):
            # xsi:type then names one of them, and a validator holds the element to it.
            element.set("type", "xs:anyType")
            return list(models)
    return []


def _restriction(parent: etree._Element, base: str, **attributes: str) -> etree._Element:
    simple = etree.SubElement(parent, _xs("simpleType"), attributes)
    return etree.SubElement(simple, _xs("restriction"), base=base)


def _facet(bound: Bound) -> tuple[str, str]:
    match bound:
        case Ge():
            return "minInclusive", str(bound.ge)
        case Gt():
            return "minExclusive", str(bound.gt)
        case Le():
            return "maxInclusive", str(bound.le)
        case _:
            return "maxExclusive", str(bound.lt)


def _annotate(element: etree._Element, text: str | None) -> None:
    if text:
        annotation = etree.SubElement(element, _xs("annotation"))
        etree.SubElement(annotation, _xs("documentation")).text = " ".join(text.split())


def _xs(name: str) -> str:
    return f"{{{_XS}}}{name}"
