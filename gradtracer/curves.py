"""Curves as one line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int = 60, *, among: Sequence[float | None] | None = None) -> str:
    """A curve as one line of block characters.

    Args:
        values: Values in order; None (missing or not finite) is drawn as ``×``.
        width: At most so many characters; each shows the mean of its share of the values.
        among: The values that the scale spans, these included; the curve's own by default. Curves drawn among the same
            values can be compared.

    Returns:
        The line, lowest value ``▁``, highest ``█``; logarithmic where `is_log_scale` says so.
    """
    finite = [v for v in (values if among is None else among) if v is not None]
    if not finite:
        return "×" * min(len(values), width)
    to_scale = math.log if is_log_scale(finite) else float
    low, high = to_scale(min(finite)), to_scale(max(finite))
    count = min(len(values), width)
    line = ""
    for i in range(count):
        bucket = values[i * len(values) // count : (i + 1) * len(values) // count]
        shown = [to_scale(v) for v in bucket if v is not None]
        if not shown:
            line += "×"
            continue
        share = (sum(shown) / len(shown) - low) / (high - low) if high > low else 0.0
        line += _BLOCKS[min(7, int(share * 8))]
    return line


def is_log_scale(finite: Sequence[float]) -> bool:
    """Whether the values are drawn on a logarithmic scale: positive, and spanning a factor of more than 100."""
    return min(finite) > 0 and max(finite) / min(finite) > 100
