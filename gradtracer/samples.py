"""What the capture hands to detectors and journal: one sample a step, with a table of layers at sampled steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gradtracer.signals import MISSING

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    """Which number stands where in a packed table: pairs of (layer, layer signal), in order."""

    columns: tuple[tuple[str, str], ...]

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers, in order of first appearance."""
        return tuple(dict.fromkeys(layer for layer, _ in self.columns))

    @cached_property
    def index(self) -> dict[tuple[str, str], int]:
        """Position of each (layer, signal)."""
        return {column: i for i, column in enumerate(self.columns)}

    @cached_property
    def by_signal(self) -> dict[str, tuple[tuple[str, ...], NDArray[np.intp]]]:
        """For each signal, the layers that have it and their positions."""
        found: dict[str, tuple[list[str], list[int]]] = {}
        for i, (layer, signal) in enumerate(self.columns):
            names, positions = found.setdefault(signal, ([], []))
            names.append(layer)
            positions.append(i)
        return {s: (tuple(names), np.asarray(positions, dtype=np.intp)) for s, (names, positions) in found.items()}


@dataclass(frozen=True)
class LayerTable:
    """Layer signals of one step: `values` is float32 `[len(layout.columns)]`, coded as in `gradtracer.signals`."""

    layout: Layout
    values: FloatArray
    look_back: bool = False
    """Whether it was taken out of the ring after its step, on suspicion: then no detector saw it."""

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers of the table."""
        return self.layout.layers

    def get(self, layer: str, signal: str) -> float:
        """The value, NaN where it was not recorded, infinity where it was not finite."""
        i = self.layout.index.get((layer, signal))
        return MISSING if i is None else float(self.values[i])

    def signal(self, signal: str) -> dict[str, float]:
        """The signal by layer, in layout order, without the layers that lack it."""
        if signal not in self.layout.by_signal:
            return {}
        names, positions = self.layout.by_signal[signal]
        values = self.values[positions].tolist()
        return {n: v for n, v in zip(names, values, strict=True) if not math.isnan(v)}


@dataclass(frozen=True)
class Sample:
    """One step. Numbers are coded as in `gradtracer.signals`: NaN is missing, infinity is not finite."""

    step: int
    time_s: float
    """Unix time at the end of the step, seconds."""
    loss: float = MISSING
    grad_norm: float = MISSING
    learning_rate: float = MISSING
    step_time_s: float = MISSING
    num_non_finite_grads: float = 0.0
    layers: LayerTable | None = None
    """Present at sampled steps only; it may hold fewer signals than usual."""
