"""Class 0 is never a label."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.detectors._labels import LabelHistory
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class UnusedFirstClass(Detector):
    """The labels fill all classes but class 0: they look numbered from 1.

    What:
        A classifier with one label a row, whose first output is never the target while all others are.

    Why:
        Labels that count from 1 train without an error where the model has an output to spare; whoever reads its
        answers from 0 on finds each of them off by one.

    Definition:
        By the counts so far: of three classes or more class 0 has no label, and each other class has at least 10, with
        one label a row and no ignore_index of 0.

    Thresholds:
        Were class 0 as frequent as the rarest other class, none of it would come with a chance of exp(-10) = 5e-5.
        Token vocabularies keep 0 for padding, and are not judged: they have many labels a row.

    Fixes:
        In the source: subtract 1, or read the answers with the same numbering.

    References:
        Hanley, Lippman-Hand 1983, JAMA 249.
    """

    code = "unused_first_class"
    signal = "label_first_share"

    MIN_CLASSES = 3
    MIN_COUNT = 10

    def __init__(self) -> None:
        self._history = LabelHistory(length=1)

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The counts so far."""
        if not self._history.update(sample, "label_first_share"):
            return None
        now = self._history.readings[-1]
        if (
            now["num_label_outputs"] < self.MIN_CLASSES
            or now["label_first_share"] > 0
            or now["label_least_count"] < self.MIN_COUNT
            or now["labels_per_row"] != 1.0
        ):
            return []
        return [
            Finding(
                state="unused",
                severity=Severity.WARNING,
                confidence=0.8,
                evidence=(
                    Measure(name="label_first_share", value=0.0),
                    Measure(name="label_least_count", value=now["label_least_count"], threshold=self.MIN_COUNT),
                ),
                message=f"Of {now['num_label_outputs']:.0f} classes, class 0 is no row's label, and each of the others "
                f"is that of {now['label_least_count']:.0f} rows at least.",
            )
        ]
