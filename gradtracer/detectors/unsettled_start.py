"""First updates that throw a deep model to where it learns nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer import stats
from gradtracer.detectors._running import LossHistory
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, ModelDescription, Observation, OptimizerDescription, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class UnsettledStart(Detector):
    """At full rate from the first step an adaptive optimizer moves every layer far, and the loss never falls after.

    What:
        Deep or attention models whose first updates, made before the second moments have settled, are a large part of
        the weights, and whose loss then stays where it began.

    Why:
        Adam's first update has the length of the rate in every direction, however uncertain it is. In a deep model such
        updates of all layers add up; it lands where outputs hardly depend on the input, and does not come back.

    Definition:
        All must hold (no units): the optimizer is of Adam's kind; the model has attention or at least 8 layers; the
        rate of the first step is at least half of the largest of the first 20; in one of the first three steps the
        median over layers of ``||update|| / ||w||`` is at least 0.08; after 120 steps the loss of the last 20 is above
        0.95 of the first one, and not below that of steps 60 to 80 (rank sum z > -3).

    Thresholds:
        0.08: Adam's first update has the ratio eta / RMS(w); at the usual 1e-3 and RMS(w) of 0.02 to 0.1 it is 0.01 to
        0.05. 120 steps leave out the plateau with which transformers begin.

    Fixes:
        rollback to a snapshot from before; set_learning_rate to a tenth. In the source: raise the rate over some
        hundred steps, or put the normalisation before the layers.

    References:
        Liu et al. 2020, arXiv:1908.03265 (variance of the adaptive rate). Xiong et al. 2020, arXiv:2002.04745
        (warm-up and the place of the normalisation). Huang et al. 2020, ICML (T-Fixup).
    """

    code = "unsettled_start"
    signal = "update_ratio"

    FAR = 0.08
    MIN_LAYERS = 8
    MIN_STEPS = 120
    FIRST_STEPS = 3
    WINDOW = 20
    EARLY = 60
    STALLED = 0.95
    NO_TREND_Z = -3.0

    def __init__(self) -> None:
        self._applies = False
        self._adaptive = False
        self._ratio = 0.0
        self._rates: list[float] = []
        self._early: list[float] = []
        self._last: list[float] = []
        self._loss = LossHistory()
        self._num_steps = 0

    def observe(self, observation: Observation) -> None:
        """Learn what is trained, and by whom."""
        if isinstance(observation, ModelDescription):
            types = [layer.type for layer in observation.layers]
            layers = [layer for layer in observation.layers if layer.num_parameters and "Norm" not in layer.type]
            attends = any("Attention" in t or "Transformer" in t for t in types)
            named = any("attn" in layer.name.lower() or "attention" in layer.name.lower() for layer in layers)
            self._applies = attends or named or len(layers) >= self.MIN_LAYERS
        elif isinstance(observation, OptimizerDescription) and self._num_steps <= self.WINDOW:
            self._adaptive = "Adam" in observation.type

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The first updates, and the loss since."""
        self._num_steps += 1
        if len(self._rates) < self.WINDOW and not math.isnan(sample.learning_rate):
            self._rates.append(sample.learning_rate)
        if sample.step < self.FIRST_STEPS and sample.layers is not None:
            ratios = sorted(u for u in sample.layers.signal("update_ratio").values() if math.isfinite(u))
            if ratios:
                self._ratio = max(self._ratio, ratios[len(ratios) // 2])
        if not math.isfinite(sample.loss):
            return None
        self._loss.update(sample.loss)
        if 0 <= self._num_steps - 1 - self.EARLY < self.WINDOW:
            self._early.append(sample.loss)
        self._last = [*self._last[-self.WINDOW + 1 :], sample.loss]
        if not (self._applies and self._adaptive and self._ratio >= self.FAR) or self._num_steps < self.MIN_STEPS:
            return None
        first = self._loss.first
        if self._rates[0] < 0.5 * max(self._rates) or len(self._early) < self.WINDOW:
            return ()
        level = sorted(self._last)[len(self._last) // 2]
        if first <= 0 or level <= self.STALLED * first or stats.rank_sum_z(self._early, self._last) <= self.NO_TREND_Z:
            return ()
        return [
            Finding(
                state="thrown",
                severity=Severity.WARNING,
                confidence=0.8,
                evidence=(
                    Measure(name="update_ratio", value=self._ratio, threshold=self.FAR, baseline=1e-3),
                    Measure(name="loss", value=level, baseline=first),
                ),
                message=f"The first updates, at full rate, moved half of the layers by {self._ratio:.2g} of their norm "
                f"or more, and the loss has not fallen in {self._num_steps} steps.",
                since=0,
            )
        ]
