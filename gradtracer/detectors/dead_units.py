"""Rectifier units that are zero for every row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, ModelDescription, Observation, Severity
from gradtracer.samples import LayerTable, Sample

# Layers whose gradient rows belong to units of an activation; rows of an embedding table are zero because the batch
# did not ask for them.
_UNIT_ROWS = ("Linear", "Conv")


@dataclass
class _Watched:
    """One rectifier, or one layer that feeds a functional one."""

    first: list[tuple[float, float]] = field(default_factory=list)
    """Dead and zero fraction of the first samples."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=4))
    injured_at: float = math.inf
    """Dead fraction after the last sudden rise; infinity where there was none."""


@DETECTORS.register
class DeadUnits(Detector):
    """A large part of a layer's rectified units is zero for every row of every batch, so it no longer learns.

    What:
        Layers whose rectifier died as a whole, or lost most of its units at once. The layer named is the one that feeds
        the rectifier: its weights are what has to be mended.

    Why:
        A unit that is zero on every row passes no gradient to its weights, so it stays zero; a dead layer also cuts off
        everything before it.

    Definition:
        d, the share of units that are zero on all rows of the batch, and z, the share of zeros among all outputs.
        dead: d >= 0.99. dying: d rose by at least 0.3 within 3 sampled steps, has since stayed at 0.5 or more, and
        exceeds by 0.3 what chance explains, ``z^B`` with ``B = log d_0 / log z_0`` from the first samples (the number
        of rows that act as independent). Both at three sampled steps in a row, and where the gradient of the feeding
        layer was recorded, as large a share of its rows must be exactly zero. Where the rectifier is a function and no
        module, the share of zero gradient rows stands for d: then only a sudden rise counts, of the layer nearest to
        the output that shows it. `critical` where nothing at all gets through.

    Thresholds:
        0.99 leaves one unit in a hundred and is beyond chance for any batch. 0.5 and 0.3: a healthy rectifier may end
        with 10 to 40 % dead units (Lu et al. 2019; Karpathy, CS231n) and gets there slowly, as it grows sparse; an
        injury is sudden. The correction by z^B is for small batches: with two rows a quarter of the units is zero on
        both by chance.

    Fixes:
        rollback to before the injury and set_learning_rate to what it was; in the source a leaky slope, a smaller
        negative bias, a lower rate.

    References:
        Maas, Hannun, Ng 2013, ICML workshop, section 2. Lu, Shin, Su, Karniadakis 2019, arXiv:1903.06733. Karpathy,
        CS231n notes, "Commonly used activation functions".
    """

    code = "dead_units"
    signal = "dead_unit_fraction"
    enter_after = 3

    DEAD = 0.99
    MANY = 0.5
    SUDDEN_RISE = 0.3
    NUM_FIRST = 3
    AGREEMENT = 0.1

    def __init__(self) -> None:
        self._fed_by: dict[str, str] = {}
        self._types: dict[str, str] = {}
        self._order: dict[str, int] = {}
        self._rectifiers: dict[str, _Watched] = {}
        self._layers: dict[str, _Watched] = {}

    def observe(self, observation: Observation) -> None:
        """Learn which layer feeds which rectifier."""
        if isinstance(observation, ModelDescription):
            self._types = {layer.name: layer.type for layer in observation.layers}
            self._order = {layer.name: i for i, layer in enumerate(observation.layers)}
            self._fed_by = self._feeding_layers(observation)

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The rectifiers at a sampled step whose activations or gradients were read."""
        if sample.layers is None:
            return None
        dead = sample.layers.signal("dead_unit_fraction")
        zero_rows = sample.layers.signal("zero_grad_fraction")
        if not dead and not zero_rows:
            return None
        findings = [f for rectifier, d in dead.items() if (f := self._rectifier(rectifier, d, sample.layers))]
        if sample.grad_norm > 0:
            # With no gradient at all (a hinge loss that is satisfied) zero rows say nothing about a layer.
            functional = self._functional(zero_rows, {self._fed_by.get(r, r) for r in dead})
            findings.extend([functional] if functional else [])
        return findings

    def _rectifier(self, rectifier: str, d: float, table: LayerTable) -> Finding | None:
        watched = self._rectifiers.setdefault(rectifier, _Watched())
        z = table.get(rectifier, "activation_zero_fraction")
        if len(watched.first) < self.NUM_FIRST:
            watched.first.append((d, z))
        self._note_injury(watched, d)
        layer = self._fed_by.get(rectifier, rectifier)
        zero_rows = table.get(layer, "zero_grad_fraction")
        if zero_rows < d - self.AGREEMENT:
            return None
        if d >= self.DEAD:
            return self._finding(layer, rectifier, "dead", d, math.nan, table)
        by_chance = _dead_by_chance(watched.first, z)
        if d >= self.MANY and d >= watched.injured_at - self.AGREEMENT and d - by_chance >= self.SUDDEN_RISE:
            return self._finding(layer, rectifier, "dying", d, by_chance, table)
        return None

    def _functional(self, zero_rows: dict[str, float], seen: set[str]) -> Finding | None:
        found: list[tuple[str, float]] = []
        for layer, share in zero_rows.items():
            if layer in seen or not any(word in self._types.get(layer, "") for word in _UNIT_ROWS):
                continue
            watched = self._layers.setdefault(layer, _Watched())
            if len(watched.first) < self.NUM_FIRST:
                watched.first.append((share, share))
            self._note_injury(watched, share)
            if share >= self.MANY and share >= watched.injured_at - self.AGREEMENT:
                found.append((layer, share))
        if not found:
            return None
        # Everything before a dead layer gets no gradient either; the one nearest to the output is the one that died.
        layer, share = max(found, key=lambda pair: self._order.get(pair[0], 0))
        return self._finding(layer, layer, "dead" if share >= self.DEAD else "dying", share, math.nan, None)

    def _note_injury(self, watched: _Watched, d: float) -> None:
        if watched.recent and d - min(watched.recent) >= self.SUDDEN_RISE and d >= self.MANY:
            watched.injured_at = d
        elif d < self.MANY:
            watched.injured_at = math.inf
        watched.recent.append(d)

    def _feeding_layers(self, model: ModelDescription) -> dict[str, str]:
        """For each layer the nearest one before it that holds parameters, by way of what feeds what."""
        infos = {layer.name: layer for layer in model.layers}
        feeding: dict[str, str] = {}
        for layer in model.layers:
            name, visited = layer.fed_by, {layer.name}
            while name in infos and name not in visited:
                if any(word in infos[name].type for word in _UNIT_ROWS) or infos[name].fed_by not in infos:
                    break
                visited.add(name)
                name = infos[name].fed_by
            if name in infos:
                feeding[layer.name] = name
        return feeding

    def _finding(
        self, layer: str, rectifier: str, state: str, d: float, by_chance: float, table: LayerTable | None
    ) -> Finding:
        cut = d >= 1.0 and table is not None and table.get(layer, "grad_norm") == 0.0
        through = "" if layer == rectifier else f" (seen at {rectifier})"
        return Finding(
            state=state,
            severity=Severity.CRITICAL if cut else Severity.WARNING,
            layer=layer,
            confidence=0.95,
            evidence=(
                Measure(
                    name="dead_unit_fraction",
                    value=d,
                    baseline=by_chance if math.isfinite(by_chance) else None,
                    threshold=self.DEAD if state == "dead" else self.MANY,
                ),
            ),
            message=f"{d:.0%} of the units of {layer} are zero for every row{through}.",
        )


def _dead_by_chance(first: Sequence[tuple[float, float]], z: float) -> float:
    """Share of units that are zero on every row by chance alone, when a share z of all outputs is zero."""
    d0, z0 = sorted(first)[len(first) // 2]
    if not (0.0 < d0 < 1.0 and 0.0 < z0 < 1.0 and 0.0 < z <= 1.0):
        return 0.0
    return z ** max(1.0, math.log(d0) / math.log(z0))
