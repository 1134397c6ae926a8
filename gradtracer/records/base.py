"""What every record is: frozen, closed, finite, and free of text that could deceive a reader."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

NAME_LENGTH = 256
TEXT_LENGTH = 4_000

# Directional and zero-width characters are of category Cf and are dropped with the rest of it; line and paragraph
# separators (Zl, Zp) would break line-based protocols; surrogates (Cs) cannot be encoded. What XML 1.0 forbids is all
# in Cc, Cs and Cn, so clean text can stand in XML as it is.
_DROPPED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_KEPT = frozenset("\n\t")
# Letters and marks that render as nothing (Default_Ignorable_Code_Point of Unicode outside Cf and Cn). Variation
# selectors among them can carry a hidden message of any length behind one visible character.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Terminal control sequences (ECMA-48: CSI, and OSC up to its terminator), whole: without its ESC the rest of one
# would stay behind as litter.
_TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


def clean(text: str, length: int | None = TEXT_LENGTH) -> str:
    """Text from the user's program, made harmless: it is data, never instructions.

    Terminal sequences, control, bidirectional, invisible, private-use and unassigned characters and lone surrogates
    are dropped (newline and tab stay). What is longer than `length` characters is cut and ends in an ellipsis.
    """
    if text.isascii() and text.isprintable():
        kept = text
    else:
        text = _INVISIBLE.sub("", _TERMINAL_SEQUENCE.sub("", text))
        kept = "".join(c for c in text if c in _KEPT or unicodedata.category(c) not in _DROPPED_CATEGORIES)
    return kept if length is None or len(kept) <= length else kept[: length - 1] + "…"


def clean_name(text: str) -> str:
    """`clean` for names: one line, at most `NAME_LENGTH` characters."""
    return clean(text.replace("\n", " ").replace("\t", " "), NAME_LENGTH)


Name = Annotated[str, AfterValidator(clean_name)]
"""A name from the user's program: one line, cleaned, capped."""

Text = Annotated[str, AfterValidator(clean)]
"""Free text: lines, cleaned, capped."""

LongText = Annotated[str, AfterValidator(lambda text: clean(text, None))]
"""Text that this package wrote itself, cleaned and of any length: a rendered report, say."""


def finite(value: float | None) -> float | None:
    """The value where it is a finite number, else None: records hold no NaN and no infinity."""
    return None if value is None or not math.isfinite(value) else float(value)


class Record(BaseModel):
    """A frozen value; unknown fields and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Document(Record):
    """A record that stands on its own: it says of which kind it is, and of which version its schema.

    A subclass declares `kind`, the snake_case name of its class.
    """

    published: ClassVar[bool] = True
    """Whether it may leave the machine; then its schema is in ``schemas/``."""

    schema_version: Literal["1"] = "1"


class Answer(Document):
    """A document that answers a question: it may have been shortened, and it says what to ask next."""

    next_steps: tuple[Text, ...] = Field(default=(), description="What to ask or do next.")
    left_out: tuple[Text, ...] = Field(
        default=(), description="What was left out to keep the answer short, and how to get it."
    )
