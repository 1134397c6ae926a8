"""Running statistics that do not describe the batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@dataclass(frozen=True)
class _Reading:
    step: int
    mean_gap: float
    var_gap: float
    noise: float


@DETECTORS.register
class RunningStatisticsDetector(Detector):
    """A batch normalisation will do something else in evaluation than in training.

    What:
        A running mean or variance that stays away from those of all recent batches, or that is the last batch's.

    Why:
        Training looks perfect, since it uses the batch; evaluation uses the running statistics.

    Definition:
        In three sampled steps in a row, after at least 50 batches: ``running_mean_gap >= 1`` standard deviation, or
        ``running_var_gap >= log 3`` (unit: nats). `warning` where the momentum is below 0.005 or the statistics have
        had more than 3 / momentum batches to settle, else `info`. Or: a momentum of 0.5 and more, and batch means that
        scatter by 0.3 standard deviations (``running_mean_noise``).

    Thresholds:
        One standard deviation moves half of the inputs of a rectifier to its other side; with the default momentum of
        0.1 the gap is 0.5 % of the first one after 50 batches, and what remains is a drift of the last 10. Batch
        variances of heavy-tailed inputs lie below their mean by up to a factor of 2 to 3 in standard deviation, hence
        log 3. Below 0.005 lies no published choice of momentum (0.1 is torch's, 0.01 and 0.001 are what 0.99 and 0.999
        of other frameworks mean; the latter needs thousands of batches). A scatter of 0.3 moves every tenth input
        across a threshold.

    Fixes:
        Set `momentum` to 0.1, or run some hundred batches in training mode to recalibrate.

    References:
        Ioffe, Szegedy 2015, arXiv:1502.03167. Wu, Johnson 2021, arXiv:2105.07576 (rethinking "batch" in BatchNorm),
        section 3.
    """

    code = "running_statistics"
    signal = "running_mean_gap"
    enter_after = 1

    IN_A_ROW = 3
    MIN_BATCHES = 50
    MEAN_GAP = 1.0
    VAR_GAP = math.log(3.0)
    TINY, SETTLED = 0.005, 3.0
    LARGE, SCATTER = 0.5, 0.3

    def __init__(self) -> None:
        self._recent: dict[str, deque[_Reading]] = {}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The normalisations at a sampled step."""
        table = sample.layers
        if table is None:
            return None
        gaps = table.signal("running_mean_gap")
        if not gaps:
            return None
        findings: list[Finding] = []
        for layer, gap in gaps.items():
            num_batches = table.get(layer, "num_batches_tracked")
            if num_batches < self.MIN_BATCHES:
                continue
            recent = self._recent.setdefault(layer, deque(maxlen=self.IN_A_ROW))
            recent.append(
                _Reading(sample.step, gap, table.get(layer, "running_var_gap"), table.get(layer, "running_mean_noise"))
            )
            if len(recent) == self.IN_A_ROW:
                found = self._judge(layer, list(recent), table.get(layer, "norm_momentum"), num_batches)
                findings.extend([found] if found else [])
        return findings

    def _judge(self, layer: str, recent: list[_Reading], momentum: float, num_batches: float) -> Finding | None:
        mean_gap, var_gap = min(r.mean_gap for r in recent), min(r.var_gap for r in recent)
        noise = min(r.noise for r in recent)
        if momentum >= self.LARGE and noise >= self.SCATTER:
            return self._finding(
                layer, "last_batch", Severity.WARNING, Measure(name="running_mean_noise", value=noise,
                threshold=self.SCATTER), momentum,
                f"The running statistics of {layer} follow the last batch (momentum {momentum:.3g}), and batches "
                f"differ by {noise:.2f} standard deviations.",
            )  # fmt: skip
        if not (mean_gap >= self.MEAN_GAP or var_gap >= self.VAR_GAP):
            return None
        settled = momentum < 0 or num_batches * momentum >= self.SETTLED
        severity = Severity.WARNING if settled or momentum < self.TINY else Severity.INFO
        measure = (
            Measure(name="running_mean_gap", value=mean_gap, threshold=self.MEAN_GAP)
            if mean_gap >= self.MEAN_GAP
            else Measure(name="running_var_gap", value=var_gap, threshold=self.VAR_GAP)
        )
        return self._finding(
            layer, "lagging", severity, measure, momentum,
            f"After {num_batches:.0f} batches the running mean of {layer} is {mean_gap:.2f} standard deviations from "
            f"that of every recent batch, the deviation off by a factor of {math.exp(var_gap):.2f} "
            f"(momentum {momentum:.3g}).",
        )  # fmt: skip

    def _finding(
        self, layer: str, state: str, severity: Severity, measure: Measure, momentum: float, message: str
    ) -> Finding:
        return Finding(
            state=state,
            severity=severity,
            layer=layer,
            confidence=0.95,
            evidence=(measure, Measure(name="norm_momentum", value=momentum, baseline=0.1)),
            message=message,
        )
