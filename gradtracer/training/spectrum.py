"""Whether a weight matrix still looks as it was drawn at random."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_MIN_ROWS = 8
_MAX_ELEMENTS = 4_000_000
LEARNT_EDGE = 1.1
"""Largest singular value over that of a random matrix. Of 100 random matrices of 8 x 64 none exceeds it; training
moves single directions beyond it long before the loss is good (Martin and Mahoney 2021, section 4)."""


def edge_ratio(weight: Tensor) -> float:
    """Largest singular value over the edge s (sqrt(m) + sqrt(n)) of an m x n matrix of independent entries of spread s.

    NaN where the matrix is too small to tell, or too large to ask.

    Args:
        weight: A weight of two axes or more; the first counts the rows.
    """
    if weight.dim() < 2 or weight.numel() > _MAX_ELEMENTS:
        return math.nan
    with torch.no_grad():
        matrix = weight.detach().flatten(1).to("cpu", torch.float64)
        if min(matrix.shape) < _MIN_ROWS:
            return math.nan
        matrix = matrix - matrix.mean()
        spread = float(matrix.std(unbiased=False))
        if not spread > 0 or not math.isfinite(spread):
            return math.nan
        rows, columns = matrix.shape
        largest = float(torch.linalg.svdvals(matrix)[0])
    return largest / (spread * (math.sqrt(rows) + math.sqrt(columns)))


def looks_learnt(weights: Iterable[Tensor]) -> bool:
    """Whether any of the weights has left the randomness it was drawn with."""
    return any(edge_ratio(w) > LEARNT_EDGE for w in weights)
