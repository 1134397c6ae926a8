"""Rectifier units that are zero for every row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradtracer.detectors._running import LossHistory
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, ModelDescription, Observation, Severity
from gradtracer.samples import LayerTable, Sample

# Layers whose gradient rows belong to units of an activation; rows of an embedding table are zero because the batch
# did not ask for them.
_UNIT_ROWS = ("Linear", "Conv")

REPEATED_CALL = "#"
"""The second call of a module within one forward pass is recorded as `module#2`."""


@dataclass
class _Watched:
    """The share of dead units of one layer, over the sampled steps."""

    recent: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=16))
    """Step, share of dead units, share of zeros in the output."""
    after_injury: float = math.inf
    """Share after the last sudden rise; infinity where there was none."""


@DETECTORS.register
class DeadUnits(Detector):
    """A large part of a layer's rectified units is zero for every row, so it no longer learns.

    What:
        Layers whose rectifier died as a whole, or lost most of its units at once. The layer named is the one that feeds
        the rectifier: its weights are what has to be mended.

    Why:
        A unit that is zero on every row passes no gradient to its weights, so it stays zero; a dead layer also cuts off
        everything before it.

    Definition:
        d, the share of units that put out nothing in all rows read lately; z, the share of zeros in the output of this
        step; r, the share of output units of the feeding layer whose gradient is exactly zero. No units.
        dead: d >= 0.99 or z = 1. dying: d >= 0.5 after a rise by at least 0.3 within 10 steps (or from one sampled step
        to the next), z with it by 0.15, and the loss has given up at least half of what it had gained (four times its
        noise or more). In both r, where it was recorded, must be at least d - 0.1. Where the rectifier is a function
        and no module, r stands for d, and the output of the layer must be negative: its mean plus two standard
        deviations for dead, its mean for dying; the last layer is left out, and of several the one nearest to the
        output is named, since a dead layer silences those before it.
        Three sampled steps in a row. `critical` where no gradient at all reaches the feeding layer.

    Thresholds:
        0.99 leaves one unit in a hundred. 0.5 and 0.3: a healthy rectifier may end with 10 to 40 % dead units, now and
        then with more (Lu et al. 2019; Karpathy, CS231n), and gets there slowly, as it grows sparse and the loss falls;
        an injury is sudden and costs. 0.15 is half of 0.3, since about half of what live units put out is zero: without
        it the units had been silent before, and were merely counted late. 0.1 is for units that were silent on the rows
        read and not on this batch.

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
    SUDDEN_STEPS = 10
    AGREEMENT = 0.1
    LOST = 0.5

    def __init__(self) -> None:
        self._fed_by: dict[str, str] = {}
        self._types: dict[str, str] = {}
        self._order: dict[str, int] = {}
        self._watched: dict[str, _Watched] = {}
        self._loss = LossHistory()

    def observe(self, observation: Observation) -> None:
        """Learn which layer feeds which rectifier."""
        if isinstance(observation, ModelDescription):
            self._types = {layer.name: layer.type for layer in observation.layers}
            self._order = {layer.name: i for i, layer in enumerate(observation.layers)}
            self._fed_by = _feeding_layers(observation)

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The rectifiers at a sampled step whose activations or gradients were read."""
        if math.isfinite(sample.loss):
            self._loss.update(sample.loss)
        table = sample.layers
        if table is None:
            return None
        dead = table.signal("dead_unit_fraction")
        rows = table.signal("zero_grad_fraction")
        if not dead and not rows:
            return None
        findings = [f for rectifier in dead if (f := self._module(rectifier, dead[rectifier], sample.step, table))]
        if sample.grad_norm > 0:
            # With no gradient at all (a hinge loss that is satisfied) zero rows say nothing about a layer.
            seen = {self._fed_by.get(rectifier, rectifier).partition(REPEATED_CALL)[0] for rectifier in dead}
            candidates = [layer for layer in rows if layer not in seen and layer in self._order]
            functional = self._functions(candidates, rows, sample.step, table)
            findings.extend([functional] if functional else [])
        return findings

    def _module(self, rectifier: str, d: float, step: int, table: LayerTable) -> Finding | None:
        layer = self._fed_by.get(rectifier, rectifier).partition(REPEATED_CALL)[0]
        zeros = table.get(rectifier, "activation_zero_fraction")
        if zeros == 1.0:
            d = 1.0
        injured = self._is_injured(rectifier, step, d, zeros)
        if table.get(layer, "zero_grad_fraction") < d - self.AGREEMENT:
            return None
        if d >= self.DEAD:
            return self._finding(layer, rectifier, "dead", d, table)
        return self._finding(layer, rectifier, "dying", d, table) if injured and self._costs() else None

    def _functions(
        self, candidates: Sequence[str], rows: dict[str, float], step: int, table: LayerTable
    ) -> Finding | None:
        last = max(self._order, key=self._order.__getitem__, default=None)
        found: list[tuple[str, str]] = []
        for layer in candidates:
            if layer == last or not any(word in self._types[layer] for word in _UNIT_ROWS):
                continue
            share = rows[layer]
            injured = self._is_injured(layer, step, share, share)
            mean, std = table.get(layer, "activation_mean"), table.get(layer, "activation_std")
            if share >= self.DEAD and mean + 2 * std < 0:
                found.append((layer, "dead"))
            elif injured and mean < 0 and self._costs():
                found.append((layer, "dying"))
        if not found:
            return None
        layer, state = max(found, key=lambda pair: self._order[pair[0]])
        return self._finding(layer, layer, state, rows[layer], table)

    def _is_injured(self, name: str, step: int, d: float, zeros: float) -> bool:
        watched = self._watched.setdefault(name, _Watched())
        before = [share for at, share, _ in watched.recent if step - at <= self.SUDDEN_STEPS]
        before.extend(share for _, share, _ in list(watched.recent)[-1:])
        if d < self.MANY:
            watched.after_injury = math.inf
        elif before and d - min(before) >= self.SUDDEN_RISE:
            zeros_before = min(z for _, _, z in watched.recent)
            # Not recorded (NaN) compares false: without the zeros the rise of d has to do.
            if not zeros - zeros_before < self.SUDDEN_RISE / 2:
                watched.after_injury = d
        watched.recent.append((step, d, zeros))
        return d >= self.MANY and d >= watched.after_injury - self.AGREEMENT

    def _costs(self) -> bool:
        loss = self._loss
        return loss.has_learned and loss.lost_progress(loss.level) >= self.LOST

    def _finding(self, layer: str, rectifier: str, state: str, d: float, table: LayerTable) -> Finding:
        cut = d >= 1.0 and table.get(layer, "grad_norm") == 0.0
        where = "" if layer == rectifier else f" (seen at {rectifier})"
        return Finding(
            state=state,
            severity=Severity.CRITICAL if cut else Severity.WARNING,
            layer=layer,
            confidence=0.95,
            evidence=(
                Measure(
                    name="dead_unit_fraction",
                    value=d,
                    threshold=self.DEAD if state == "dead" else self.MANY,
                ),
            ),
            message=f"{d:.0%} of the units of {layer} put out zero for every row{where}.",
        )


def _feeding_layers(model: ModelDescription) -> dict[str, str]:
    """For each layer the nearest one before it that has units of its own, through normalisations and the like."""
    infos = {layer.name: layer for layer in model.layers}
    feeding: dict[str, str] = {}
    for layer in model.layers:
        name, visited = layer.fed_by, {layer.name}
        while name is not None and name in infos and name not in visited:
            feeding[layer.name] = name
            if any(word in infos[name].type for word in _UNIT_ROWS):
                break
            visited.add(name)
            name = infos[name].fed_by
    return feeding
