"""What the fields of a record hold: one walk over the models that the XML writer, its reader and the XSD all follow.

Reader, writer and schema cannot drift apart because none of them looks at an annotation itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Bound = Ge | Gt | Le | Lt


@dataclass(frozen=True)
class Atom:
    """A bool, int, float or str."""

    type: type[bool] | type[int] | type[float] | type[str]
    bounds: tuple[Bound, ...] = ()


@dataclass(frozen=True)
class OneOf:
    """One of some strings: an enumeration or a literal."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Items:
    """Any number of values of one shape."""

    item: Slot


@dataclass(frozen=True)
class Nested:
    """A record."""

    model: type[BaseModel]


@dataclass(frozen=True)
class AnyAtom:
    """An atom whose type is part of the value: True, 1, 1.0 and "1" are four values."""

    atoms: tuple[Atom, ...]


@dataclass(frozen=True)
class AnyNested:
    """One of several records, told apart by a discriminator."""

    models: tuple[type[BaseModel], ...]


Shape = Atom | OneOf | Items | Nested | AnyAtom | AnyNested


@dataclass(frozen=True)
class Slot:
    """A place for a value: its shape, and whether it may be null."""

    shape: Shape
    nullable: bool = False


@cache
def fields(model: type[BaseModel]) -> dict[str, Slot]:
    """The slots of a record, by field, in order.

    Raises:
        TypeError: If a field has an annotation that records do not use (a dict, a fixed-length tuple, a union that
            mixes records and atoms).
    """
    return {name: _slot(info.annotation, info.metadata) for name, info in model.model_fields.items()}


def _slot(annotation: Any, metadata: Sequence[object] = ()) -> Slot:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        extra = [m for e in args[1:] for m in (e.metadata if isinstance(e, FieldInfo) else [e])]
        return _slot(args[0], [*metadata, *extra])
    if origin in (Union, UnionType):
        slots = [_slot(a, metadata) for a in args if a is not NoneType]
        return Slot(_union(annotation, [s.shape for s in slots]), nullable=NoneType in args)
    if origin is Literal and all(isinstance(a, str) for a in args):
        return Slot(OneOf(args))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return Slot(Items(_slot(args[0])))
    if annotation in (bool, int, float, str):
        return Slot(Atom(annotation, tuple(m for m in metadata if isinstance(m, Bound))))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return Slot(OneOf(tuple(str(member.value) for member in annotation)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Slot(Nested(annotation))
    raise TypeError(f"no form for {annotation!r} in records: use atoms, str enumerations, records or tuple[X, ...]")


def _union(annotation: Any, shapes: list[Shape]) -> Shape:
    if len(shapes) == 1:
        return shapes[0]
    if all(isinstance(s, Atom) for s in shapes):
        return AnyAtom(tuple(s for s in shapes if isinstance(s, Atom)))
    if all(isinstance(s, Nested) for s in shapes):
        return AnyNested(tuple(s.model for s in shapes if isinstance(s, Nested)))
    raise TypeError(f"no form for {annotation!r} in records: a union is of atoms only or of records only")
