"""The labels have nothing to do with the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev

from gradtracer.detectors._labels import LabelHistory, LabelReading
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class IndependentLabels(Detector):
    """Neither inputs nor outputs of rows with different labels differ, and the loss stays at that of a blind guess.

    What:
        Labels that belong to other rows: sorted or shuffled apart from their inputs, joined by the wrong key.

    Why:
        Training goes on with healthy gradients and learns nothing, or learns its own data by heart.

    Definition:
        ``label_dependence`` (a ratio, without unit) is 1 in expectation where labels are dealt to rows at random, for
        any model. Over the last sampled steps (at least 12, over at least 30 steps) its mean plus three standard errors
        stays below 1.5, at the outputs and at the inputs, with no single column above 6 standard deviations; the
        model's weights move; and the median loss of a label is at least 0.95 of the entropy of the labels. For values
        in place of classes: below 2.5 from 20 samples on, and a squared error of at least 0.95 of the variance of the
        targets. Where the inputs cannot be read column by column (tokens, sequences, several inputs) it is `info`.

    Thresholds:
        Inputs that tell the labels have ratios of 2 and more even at random weights, since random functions of the
        input depend on the label too; shuffled labels 0.9 to 1.2 (measured on several data sets). Tasks that hide their
        labels in the interplay of two tokens or times look independent until they are learned, for hundreds of steps:
        of those nothing is claimed. 6 standard deviations come by chance in one of 1024 columns with 1e-6. One
        correlation scatters more than a table of them: chi-squared with one degree of freedom has a standard deviation
        of 1.4, hence 2.5 and 20 samples. An update ratio of 1e-4 moves weights by their own size within 10,000 steps;
        below that the step size speaks.

    Fixes:
        In the source: put inputs and labels into one order.

    References:
        Zhang, Bengio, Hardt, Recht, Vinyals 2017, arXiv:1611.03530 (networks fit random labels, slowly).
    """

    code = "independent_labels"
    signal = "label_dependence"

    MIN_SAMPLES = 12
    MIN_SAMPLES_VALUES = 20
    MIN_STEPS = 30
    BOUND = 1.5
    BOUND_VALUES = 2.5
    BEST = 6.0
    BLIND = 0.95
    MOVES = 1e-4

    def __init__(self) -> None:
        self._classes, self._values = LabelHistory(), LabelHistory()
        self._moves: dict[int, float] = {}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The dependence of the labels over the last sampled steps."""
        if sample.layers is None:
            return None
        ratios = [r for r in sample.layers.signal("update_ratio").values() if math.isfinite(r)]
        self._moves[sample.step] = max(ratios, default=0.0)
        if self._classes.update(sample, "label_dependence"):
            return self._judge(
                list(self._classes.readings), "label_dependence", self.MIN_SAMPLES, self.BOUND,
                lambda r: r["label_entropy"],
            )  # fmt: skip
        if self._values.update(sample, "value_dependence"):
            return self._judge(
                list(self._values.readings), "value_dependence", self.MIN_SAMPLES_VALUES, self.BOUND_VALUES,
                lambda r: r["target_variance_pooled"],
            )  # fmt: skip
        return None

    def _judge(
        self,
        readings: list[LabelReading],
        signal: str,
        min_samples: int,
        bound: float,
        blind: Callable[[LabelReading], float],
    ) -> list[Finding]:
        told = [r for r in readings if r[signal] >= 0 and math.isfinite(r[signal])]
        recent = told[-2 * min_samples :]
        if len(recent) > min_samples and _upper(recent, lambda r: r[signal]) >= bound:
            recent = told[-min_samples:]
        if len(recent) < min_samples or recent[-1].step - recent[0].step < self.MIN_STEPS:
            return []
        at_outputs = _upper(recent, lambda r: r[signal])
        at_inputs = _upper(recent, lambda r: r.input(signal))
        best = recent[-1].input("label_dependence_best")
        if not at_outputs < bound or at_inputs >= bound or best >= self.BEST:
            return []
        now, guess = median(r["label_loss"] for r in recent), blind(recent[-1])
        if not (guess > 0 and self.BLIND * guess <= now < math.inf) or recent[-1]["label_weight_spread"] > bound:
            return []
        if median(self._moves.get(r.step, 0.0) for r in recent) < self.MOVES:
            return []
        mean = fmean(r[signal] for r in recent)
        return [
            Finding(
                state="independent",
                severity=Severity.INFO if math.isnan(best) else Severity.WARNING,
                confidence=0.5 if math.isnan(best) else 0.95,
                evidence=(
                    Measure(name=signal, value=mean, baseline=1.0, threshold=bound),
                    Measure(name="label_loss", value=now, baseline=guess, threshold=self.BLIND * guess),
                ),
                message=f"Rows with different targets look alike to the model (dependence {mean:.2f}, chance is 1), "
                f"and the loss of {now:.3g} is that of a blind guess ({guess:.3g}).",
            )
        ]


def _upper(readings: Sequence[LabelReading], value: Callable[[LabelReading], float]) -> float:
    """Mean plus three standard errors of the readings that tell; NaN without any."""
    values = [v for r in readings if math.isfinite(v := value(r)) and v >= 0]
    if len(values) < 4:
        return math.nan
    return fmean(values) + 3.0 * stdev(values) / math.sqrt(len(values))
