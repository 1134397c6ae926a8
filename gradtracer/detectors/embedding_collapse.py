"""Rows that the loss compares have become one point."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import AuditFinding, Measure, Observation, Severity
from gradtracer.samples import Sample

_LOSS = "(loss)"


@DETECTORS.register
class EmbeddingCollapseDetector(Detector):
    """The outputs that the loss compares with each other are the same for all examples.

    What:
        A layer that faces the loss, of width 2 or more, whose rows lay apart and have come to lie on one point.

    Why:
        A triplet loss then sits at its margin, a self-supervised one at its least, and the representation tells nothing
        about its input. The gradient, a difference of rows, goes with it, so the run does not come back.

    Definition:
        row_spread (1 minus the mean cosine over pairs of rows, no unit) below 5e-3 and below a thirtieth of its largest
        value so far, for 20 steps and 3 samples at least. `warning` where the loss compares rows, or where the loss's
        own targets fell likewise; `info` for other losses.

    Thresholds:
        5e-3 is a mean cosine of 0.995 between any two examples. Healthy metric learning may contract before it spreads,
        to a fifth on the runs tried; a thirtieth keeps networks out whose outputs are alike from the start, as those of
        deep ones are. A classifier with one logit vector for all examples, or a head that predicts the same scale for
        all, collapses nothing that a loss compares, hence `info`.

    Fixes:
        In the source: normalise the embedding, semi-hard instead of hardest negatives, a stop-gradient and predictor, a
        variance term. Live: set_learning_rate after a rollback.

    References:
        Hermans, Beyer, Leibe 2017, arXiv:1703.07737, section 3. Chen & He 2021, arXiv:2011.10566. Bardes, Ponce, LeCun
        2022, arXiv:2105.04906.
    """

    code = "embedding_collapse"
    signal = "row_spread"
    enter_after = 1

    COLLAPSED, FALL = 5e-3, 30.0
    MIN_STEPS, MIN_SAMPLES = 20, 3

    def __init__(self) -> None:
        self._compares = False
        self._largest: dict[str, float] = {}
        self._since: dict[str, int] = {}
        self._num: dict[str, int] = {}

    def observe(self, observation: Observation) -> None:
        """Learn whether the loss compares rows."""
        if isinstance(observation, AuditFinding) and observation.code == "loss_compares_rows":
            self._compares = True

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """Spreads of this sample against their largest."""
        spreads = sample.layers.signal(self.signal) if sample.layers is not None else {}
        if not spreads:
            return None
        found: list[Finding] = []
        for layer, spread in spreads.items():
            if not math.isfinite(spread):
                continue
            largest = self._largest[layer] = max(self._largest.get(layer, 0.0), spread)
            if spread >= self.COLLAPSED or self.FALL * spread >= largest:
                self._since.pop(layer, None)
                self._num.pop(layer, None)
                continue
            began = self._since.setdefault(layer, sample.step)
            self._num[layer] = self._num.get(layer, 0) + 1
            if layer != _LOSS and sample.step - began >= self.MIN_STEPS and self._num[layer] >= self.MIN_SAMPLES:
                found.append(self._finding(layer, spread, largest, began))
        return found

    def _finding(self, layer: str, spread: float, largest: float, began: int) -> Finding:
        own_targets = _LOSS in self._since
        return Finding(
            state="collapsed",
            severity=Severity.WARNING if self._compares or own_targets else Severity.INFO,
            layer=layer,
            evidence=(
                Measure(name="row_spread", value=spread, baseline=largest, threshold=self.COLLAPSED),
                Measure(name="first_step", value=float(began), unit="step"),
            ),
            message=f"From step {began} on {layer} puts out nearly the same for all examples: the mean cosine "
            f"of two of them is 1 - {spread:.2g}; it was 1 - {largest:.2g}.",
        )
