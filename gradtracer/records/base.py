"""What every record is: frozen, closed, finite, and free of text that could deceive a reader."""

from __future__ import annotations

import math
import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

NAME_LENGTH = 256
TEXT_LENGTH = 4_000

# Directional and invisible characters that `unicodedata` files under Cf are dropped with the rest of that category;
# line and paragraph separators (Zl, Zp) would break line-based protocols, surrogates (Cs) cannot be encoded.
_DROPPED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_KEPT = frozenset("\n\t")


def clean(text: str, length: int = TEXT_LENGTH) -> str:
    """Text from the user's program, made harmless: it is data, never instructions.

    Control, bidirectional, zero-width, private-use and unassigned characters and lone surrogates are dropped (newline
    and tab stay), and what is longer than `length` characters is cut and ends in an ellipsis.
    """
    kept = "".join(c for c in text if c in _KEPT or unicodedata.category(c) not in _DROPPED_CATEGORIES)
    return kept if len(kept) <= length else kept[: length - 1] + "…"


def clean_name(text: str) -> str:
    """`clean` for names: one line, at most `NAME_LENGTH` characters."""
    return clean(text.replace("\n", " ").replace("\t", " "), NAME_LENGTH)


Name = Annotated[str, AfterValidator(clean_name)]
"""A name from the user's program: one line, cleaned, capped."""

Text = Annotated[str, AfterValidator(clean)]
"""Free text: lines, cleaned, capped."""


def finite(value: float | None) -> float | None:
    """The value where it is a finite number, else None: records hold no NaN and no infinity."""
    return None if value is None or not math.isfinite(value) else float(value)


class Record(BaseModel):
    """A frozen value; unknown fields and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Document(Record):
    """A record that is published on its own, with the version of its schema."""

    schema_version: Literal["1"] = "1"


class Answer(Document):
    """A document that answers a question: it may have been shortened, and it says what to ask next."""

    next_steps: tuple[Text, ...] = Field(default=(), description="What to ask or do next.")
    left_out: tuple[Text, ...] = Field(
        default=(), description="What was left out to keep the answer short, and how to get it."
    )
