"""Batches are not mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from gradtracer.detectors._labels import LabelHistory, LabelReading
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class SortedBatches(Detector):
    """The rows of a batch have far more alike targets than rows of different batches, and the loss jumps with it.

    What:
        Data that come sorted by class, by value or by file, because nothing shuffles them.

    Why:
        The model learns the class of the moment and forgets the last one: each batch's loss collapses, and the next
        class jumps up.

    Definition:
        With ``w`` the mean less two standard errors of ``label_collision`` over the last 8 to 16 sampled steps and
        ``p`` the pooled one, the index ``(w - p) / (1 - p)`` (Wright's F_ST, unbiased for batches of any size, no unit)
        is at least 0.3, with one label a row and two classes at least; and of the sampled losses since step 5 some lie
        below half of the label entropy and some of the last ten above all of it. For values: ``1 - mean variance of a
        step / pooled variance`` is at least 0.8, and losses lie below a tenth and above all of the pooled variance.

    Thresholds:
        Mixed batches have 0 in expectation, class-balanced ones below, and batches built from 4 images of each of 8
        people 0.1; sorted ones 0.5 to 1. A loss above that of a blind guess says that the model was sure of something
        else: this is the damage, and without it the order is told as `info`. Sorted values often are a curve that is
        followed, hence the stricter bound.

    Fixes:
        In the source: shuffle=True, or a random permutation every epoch.

    References:
        Wright 1951, Annals of Eugenics 15. McCloskey, Cohen 1989 (catastrophic interference). Bottou 2012, Stochastic
        Gradient Descent Tricks, section 4.1 (shuffle).
    """

    code = "sorted_batches"
    signal = "label_collision"

    MIN_SAMPLES, MAX_SAMPLES = 8, 16
    INDEX, INDEX_VALUES = 0.3, 0.8
    LOW, LOW_VALUES = 0.5, 0.1
    SETTLED = 5
    RECENT = 10

    def __init__(self) -> None:
        self._classes, self._values = LabelHistory(), LabelHistory()

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """How alike the targets of the last sampled steps are."""
        if self._classes.update(sample, "label_collision"):
            readings = list(self._classes.readings)
            newest = readings[-1]
            if newest["labels_per_row"] != 1.0 or newest["num_label_classes"] < 2:
                return []
            pooled = newest["label_collision_pooled"]
            index = (_lower([r["label_collision"] for r in readings[-self.MAX_SAMPLES :]]) - pooled) / (1.0 - pooled)
            return self._judge(readings, index, self.INDEX, newest["label_entropy"], self.LOW)
        if self._values.update(sample, "target_variance"):
            readings = list(self._values.readings)
            pooled = readings[-1]["target_variance_pooled"]
            if not pooled > 0:
                return []
            index = 1.0 + _lower([-r["target_variance"] for r in readings[-self.MAX_SAMPLES :]]) / pooled
            return self._judge(readings, index, self.INDEX_VALUES, pooled, self.LOW_VALUES)
        return None

    def _judge(
        self, readings: Sequence[LabelReading], index: float, bound: float, blind: float, low: float
    ) -> list[Finding]:
        if len(readings) < self.MIN_SAMPLES or not index >= bound:
            return []
        losses = [r["label_loss"] for r in readings if r.step >= self.SETTLED and math.isfinite(r["label_loss"])]
        damaged = bool(losses) and min(losses) < low * blind and max(losses[-self.RECENT :]) > blind
        return [
            Finding(
                state="sorted",
                severity=Severity.WARNING if damaged else Severity.INFO,
                confidence=0.95 if damaged else 0.6,
                evidence=(
                    Measure(name="batch_likeness", value=index, baseline=0.0, threshold=bound),
                    Measure(name="label_loss", value=max(losses, default=None), baseline=min(losses, default=None)),
                ),
                message=f"Rows of one batch have alike targets (index {index:.2f}; mixed batches have 0)"
                + (f", and the loss swings between {min(losses):.2g} and {max(losses):.2g}." if losses else "."),
            )
        ]


def _lower(values: Sequence[float]) -> float:
    """Mean less two standard errors: a mean over few steps scatters, most where one class has nearly all labels."""
    return fmean(values) - 2.0 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else -math.inf
