"""What a wrong name may have meant, for the messages of errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_CANDIDATES = 8


def closest(name: str, names: Iterable[str]) -> list[str]:
    """The names most like this one, else all of them."""
    names = list(names)
    return difflib.get_close_matches(name, names, n=MAX_CANDIDATES, cutoff=0.5) or names


def few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:MAX_CANDIDATES])
    return f"{shown} and {len(names) - MAX_CANDIDATES} more" if len(names) > MAX_CANDIDATES else shown


def unknown(kind: str, name: str, known: Sequence[str], hint: str) -> str:
    """The message for a name that is none of the known ones.

    Args:
        kind: What it should name.
        name: What came.
        known: What there is.
        hint: Where to look; the sentence that ends the message.
    """
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    maybe = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"there is no {kind} {name[:80]!r}.{maybe} {hint}"
