"""The model answers with the most frequent class only."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from gradtracer.detectors._labels import LabelHistory
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class MajorityOnly(Detector):
    """One class makes up most of the labels, and the model chooses it for the rest as well.

    What:
        An unweighted loss over labels of which one class has the lion's share.

    Why:
        The loss looks small and the accuracy high; the rare classes, for which such a model is mostly built, are never
        found.

    Definition:
        From step 150 on, with counts of rows: one class has at least 80 % of all labels, the loss gives the classes
        weights within a factor of 1.5, and of the rows with another label since step 50, at least 15, the model has
        chosen the right class for 5 % at most; the mean loss of these steps is at least half of the label entropy.

    Thresholds:
        15 rows with a recall of 20 % would give none with a chance of 3.5 %. A model that learns to tell the classes
        brings the loss below half of the blind guess's within some hundred steps; where classes overlap so much that it
        cannot, weights or another threshold are what is left. Rankings and rates are read from probabilities: a model
        for those may have no use for the rare class's threshold, which the cause says.

    Fixes:
        In the source: class weights (pos_weight), balanced sampling, or a threshold at the prior.

    References:
        He, Garcia 2009, IEEE TKDE 21 (learning from imbalanced data). King, Zeng 2001, Political Analysis 9 (rare
        events).
    """

    code = "majority_only"
    signal = "num_rare_labels_found"

    FROM_STEP, JUDGED_FROM = 50, 150
    SHARE = 0.8
    WEIGHTS = 1.5
    MIN_RARE = 15
    RECALL = 0.05
    HIGH = 0.5

    def __init__(self) -> None:
        self._history = LabelHistory()

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """How many rows of rare classes the model finds."""
        if not self._history.update(sample, "num_rare_labels"):
            return None
        newest = self._history.readings[-1]
        recent = [r for r in self._history.readings if r.step >= self.FROM_STEP]
        if newest.step < self.JUDGED_FROM or newest["label_top_share"] < self.SHARE or not recent:
            return []
        if newest["label_weight_spread"] > self.WEIGHTS:
            return []
        num_rare = sum(r["num_rare_labels"] for r in recent)
        num_found = sum(r["num_rare_labels_found"] for r in recent)
        loss, entropy = fmean(r["label_loss"] for r in recent), newest["label_entropy"]
        if num_rare < self.MIN_RARE or num_found > self.RECALL * num_rare or not loss >= self.HIGH * entropy:
            return []
        return [
            Finding(
                state="majority_only",
                severity=Severity.WARNING,
                confidence=0.85,
                evidence=(
                    Measure(name="label_top_share", value=newest["label_top_share"], threshold=self.SHARE),
                    Measure(name="rare_recall", value=num_found / num_rare, threshold=self.RECALL),
                    Measure(name="label_loss", value=loss, baseline=entropy, unit="nats"),
                ),
                message=f"One class has {newest['label_top_share']:.0%} of the labels, and of {num_rare:.0f} rows of "
                f"the others the model found {num_found:.0f}.",
            )
        ]
