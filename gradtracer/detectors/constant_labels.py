"""All labels are the same."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.detectors._labels import LabelHistory, LabelReading
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class ConstantLabels(Detector):
    """Every label that was seen is the same class.

    What:
        Batches of one class only, from the start or from some step on.

    Why:
        The bias of the last layer solves such a task: the loss falls to 0 and the model is useless.

    Definition:
        By the counts of the last sampled steps, at least 8 over at least 30 steps, all labels are one class, the same
        in all of them; they are 100 labels or more (640 where there are two classes only), and each class's score is
        made by a layer's own parameters.

    Thresholds:
        A class that makes up 95 % of the data fills 100 labels with a chance of 0.6 %, and one with 99 % fills 640 with
        0.2 %. Scores that are similarities (contrastive losses label the positive pair 0; pairwise rankings label all
        with 1) have no layer of their own, and constant labels by construction.

    Fixes:
        In the data: the column that was read, the folder, the default of a lookup.

    References:
        Hanley, Lippman-Hand 1983, JAMA 249 (if nothing goes wrong, is everything all right?).
    """

    code = "constant_labels"
    signal = "label_entropy"

    MIN_SAMPLES = 8
    MIN_STEPS = 30
    MIN_LABELS, MIN_LABELS_BINARY = 100, 640

    def __init__(self) -> None:
        self._history = LabelHistory(length=256)

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The labels of the last sampled steps."""
        if not self._history.update(sample, "label_top_class"):
            return None
        tail: list[LabelReading] = []
        newest = self._history.readings[-1]
        for reading in reversed(self._history.readings):
            if reading["label_collision"] < 1.0 or reading["label_top_class"] != newest["label_top_class"]:
                break
            tail.append(reading)
        if len(tail) < self.MIN_SAMPLES or newest.step - tail[-1].step < self.MIN_STEPS:
            return []
        before = self._history.readings[0]["num_labels"] / max(1, len(tail)) if len(tail) else 0.0
        seen = newest["num_labels"] - tail[-1]["num_labels"] + before
        binary = newest["num_label_outputs"] == 2
        if newest["label_is_free"] != 1.0 or seen < (self.MIN_LABELS_BINARY if binary else self.MIN_LABELS):
            return []
        return [
            Finding(
                state="constant",
                severity=Severity.WARNING,
                confidence=0.97,
                evidence=(
                    Measure(name="label_top_class", value=newest["label_top_class"]),
                    Measure(name="num_labels", value=seen),
                    Measure(name="label_entropy", value=newest["label_entropy"], unit="nats"),
                ),
                message=f"All labels from step {tail[-1].step} on are class {newest['label_top_class']:.0f}.",
            )
        ]
