"""Documents of every kind, drawn from the fields of their models."""

from __future__ import annotations

from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st
from pydantic import BaseModel

from gradtracer.shapes import AnyAtom, AnyNested, Atom, Items, Nested, OneOf, Slot, fields

# What breaks careless writers of JSON and XML, beside whatever hypothesis finds.
NASTY = (
    "",
    " ",
    "\n",
    " \t padded \n ",
    "encoder.layers.0['q\"'].<weight>&amp;",
    "]]>",
    "<![CDATA[x]]>",
    "&#0; &lt; %s {0}",
    "ctrl\x00\x07\x1b[31m\r\n\x85\u2028",
    "\u202eright to left\u200b",
    "lone \ud800 surrogate \ufffe\uffff",
    "𝛁 loss 😀 漢字 é é",
    "null",
    "true",
    "1",
    "1.0",
    "NaN",
)
TEXTS = st.one_of(st.sampled_from(NASTY), st.text(st.characters(), max_size=8))


def documents(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Instances of a record; small, since reports nest deeply."""
    return st.builds(model, **{name: _values(slot) for name, slot in fields(model).items()})


def _values(slot: Slot) -> st.SearchStrategy[Any]:
    match slot.shape:
        case Atom():
            values = _atoms(slot.shape)
        case OneOf(names):
            values = st.sampled_from(names)
        case AnyAtom(atoms):
            values = st.one_of(*map(_atoms, atoms))
        case Items(item):
            values = st.lists(_values(item), max_size=2).map(tuple)
        case Nested(model):
            values = documents(model)
        case AnyNested(models):
            values = st.one_of(*map(documents, models))
    return st.none() | values if slot.nullable else values


def _atoms(atom: Atom) -> st.SearchStrategy[Any]:
    if atom.type is bool:
        return st.booleans()
    if atom.type is str:
        return TEXTS
    low = next((b.ge if isinstance(b, Ge) else b.gt for b in atom.bounds if isinstance(b, Ge | Gt)), None)
    high = next((b.le if isinstance(b, Le) else b.lt for b in atom.bounds if isinstance(b, Le | Lt)), None)
    if atom.type is int:
        return st.integers(low, high)  # pyright: ignore[reportArgumentType]
    return st.floats(low, high, allow_nan=False, allow_infinity=False)  # pyright: ignore[reportArgumentType]
