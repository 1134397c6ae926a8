"""Weights that decay pulls to zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors._running import LossHistory
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import LayerTable, Sample


@DETECTORS.register
class WeightsDecayAway(Detector):
    """Weight decay shrinks the weights of most layers, and the loss does not fall.

    What:
        Runs in which decay is stronger than the gradient, so that weights go to zero or stay there.

    Why:
        The model forgets as fast as it learns; a common slip is a decay of 0.1 or 1 where 1e-4 or 1e-2 was meant.

    Definition:
        Of the layers with decay (no unit): a layer shrinks if its weight norm is at most half of the largest it has had
        and decay explains it, that is the median of ``w_d ||w|| / ||g||`` over the sampled steps is at least 0.8, or
        the sum over steps of ``eta w_d`` is at least 0.7 of ``ln(||w_max|| / ||w||)``. All must hold: at least half of
        these layers shrink, at least 30 steps, and the loss has gained less than a fifth of its first value (less than
        four fifths, where decay alone takes the weights to 1/e in 50 steps or fewer), or has given up at least half
        of what it had gained.

    Thresholds:
        0.8: at the balance of decay and gradient both terms are equal, and the median is about 1. Half of the norm: an
        exponential decay that has come to ln 2. A fifth of the loss leaves out every run that learns, whose decay is
        then what was wanted. 50 steps: usual settings forget in 1,000 to 100,000 steps; what is forgotten in 50 was
        seen in 50 batches.

    Fixes:
        None that is live yet: lower weight_decay where the optimizer is built.

    References:
        Krogh & Hertz 1991, NIPS. Loshchilov & Hutter 2019, arXiv:1711.05101.
    """

    code = "weights_decay_away"
    signal = "decay_over_gradient"
    enter_after = 2

    SHRUNK = 0.5
    EXPLAINED = 0.7
    BALANCE = 0.8
    MIN_STEPS = 30
    NO_GAIN = 0.2
    LOST = 0.5
    MEMORY_STEPS = 50
    MOST = 0.8

    def __init__(self) -> None:
        self._loss = LossHistory()
        self._largest: dict[str, float] = {}
        self._decayed: dict[str, float] = {}
        self._rate: dict[str, float] = {}
        self._ratios: dict[str, list[float]] = {}
        self._last_step = 0
        self._since: int | None = None

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The weights at a sampled step."""
        if math.isfinite(sample.loss):
            self._loss.update(sample.loss)
        table = sample.layers
        if table is None:
            return None
        decayed = self._take(sample.step, table)
        if not decayed or sample.step < self.MIN_STEPS:
            return None
        shrunk = [layer for layer in decayed if self._shrinks(layer, table)]
        if 2 * len(shrunk) < len(decayed) or not self._learns_nothing():
            return ()
        return [self._finding(shrunk, table)]

    def _take(self, step: int, table: LayerTable) -> list[str]:
        per_step, ratios = table.signal("decay_per_step"), table.signal("decay_over_gradient")
        norms = table.signal("weight_norm")
        for layer, rate in self._rate.items():
            self._decayed[layer] = self._decayed.get(layer, 0.0) + rate * (step - self._last_step)
        self._rate = {n: r for n, r in per_step.items() if math.isfinite(r)}
        self._last_step = step
        for layer, ratio in ratios.items():
            if math.isfinite(ratio):
                self._ratios.setdefault(layer, []).append(ratio)
        decayed = [n for n in norms if n in per_step or n in ratios]
        for layer in decayed:
            if math.isfinite(norms[layer]):
                self._largest[layer] = max(self._largest.get(layer, 0.0), norms[layer])
        if decayed and self._since is None:
            self._since = step
        return decayed

    def _shrinks(self, layer: str, table: LayerTable) -> bool:
        norm, largest = table.get(layer, "weight_norm"), self._largest.get(layer, 0.0)
        if not norm <= self.SHRUNK * largest:
            return False
        fall = math.log(largest / norm) if norm > 0 else math.inf
        ratios = sorted(self._ratios.get(layer, ()))
        balanced = bool(ratios) and ratios[len(ratios) // 2] >= self.BALANCE
        return balanced or self._decayed.get(layer, 0.0) >= self.EXPLAINED * min(fall, 1e3) > 0

    def _learns_nothing(self) -> bool:
        loss = self._loss
        if loss.count < 10:
            return False
        usual = sorted(self._rate.values())
        forgets = bool(usual) and usual[len(usual) // 2] >= 1.0 / self.MEMORY_STEPS
        enough = self.MOST if forgets else self.NO_GAIN
        gained_little = loss.first - loss.level < enough * abs(loss.first)
        return gained_little or (loss.has_learned and loss.lost_progress(loss.level) >= self.LOST)

    def _finding(self, shrunk: list[str], table: LayerTable) -> Finding:
        layer = min(shrunk, key=lambda n: table.get(n, "weight_norm") / self._largest[n])
        left = table.get(layer, "weight_norm") / self._largest[layer]
        ratios = sorted(self._ratios.get(layer, ()))
        measures = [Measure(name="weight_norm", value=table.get(layer, "weight_norm"), baseline=self._largest[layer])]
        if ratios:
            median = ratios[len(ratios) // 2]
            measures.append(Measure(name="decay_over_gradient", value=median, threshold=self.BALANCE))
        return Finding(
            state="decaying",
            severity=Severity.WARNING,
            confidence=0.9,
            evidence=tuple(measures),
            message=f"Weight decay has shrunk {layer} to {left:.2g} of its norm, and {len(shrunk) - 1} more layers, "
            "while the loss has hardly fallen.",
            since=self._since,
        )
