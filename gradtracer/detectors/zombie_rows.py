"""Embedding rows that jump back and forth."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class ZombieRows(Detector):
    """Rows of an embedding move far at every step, each time back from where the last one took them.

    What:
        An embedding table whose looked-up rows change by a good part of their length in a step while gradients of
        consecutive steps point against each other.

    Why:
        Such rows are busy and learn nothing: they jump over their optimum, or one row stands for things that pull it
        apart.

    Definition:
        Medians over the samples of the last 200 steps, at least 8 that span 60 steps: row_update_ratio at least 0.2 and
        step_cosine at most -0.15 (both without unit).

    Thresholds:
        Rows that are learned turn by a tenth of their length in the first steps and by less as they grow. Gradients of
        fresh batches are orthogonal but for what is left to learn, which makes the cosine positive; full batches at the
        edge of stability oscillate too, with steps far below a fifth of the row.

    Fixes:
        set_learning_rate, or a smaller rate for the table; in the source: look for ids that stand for several things.

    References:
        Cohen et al. 2021, arXiv:2103.00065 (oscillation at the edge of stability). Balduzzi et al. 2017,
        arXiv:1702.08591 (gradient correlation).
    """

    code = "zombie_rows"
    signal = "row_update_ratio"

    RATIO, COSINE = 0.2, -0.15
    MIN_SAMPLES, MIN_STEPS, MEMORY = 8, 60, 200

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[int, float, float]]] = {}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """Updates and directions of the tables at this sample."""
        ratios = sample.layers.signal(self.signal) if sample.layers is not None else {}
        if sample.layers is None or not ratios:
            return None
        found: list[Finding] = []
        for layer, ratio in ratios.items():
            cosine = sample.layers.get(layer, "step_cosine")
            if not (math.isfinite(ratio) and math.isfinite(cosine)):
                continue
            seen = self._seen.setdefault(layer, deque())
            seen.append((sample.step, ratio, cosine))
            while len(seen) > self.MIN_SAMPLES and sample.step - seen[0][0] > self.MEMORY:
                seen.popleft()
            if len(seen) < self.MIN_SAMPLES or seen[-1][0] - seen[0][0] < self.MIN_STEPS:
                continue
            usual_ratio, usual_cosine = median(r for _, r, _ in seen), median(c for _, _, c in seen)
            if usual_ratio >= self.RATIO and usual_cosine <= self.COSINE:
                found.append(self._finding(layer, usual_ratio, usual_cosine, seen[0][0]))
        return found

    def _finding(self, layer: str, ratio: float, cosine: float, since: int) -> Finding:
        return Finding(
            state="oscillating",
            severity=Severity.WARNING,
            layer=layer,
            evidence=(
                Measure(name="row_update_ratio", value=ratio, threshold=self.RATIO),
                Measure(name="step_cosine", value=cosine, threshold=self.COSINE),
                Measure(name="first_step", value=float(since), unit="step"),
            ),
            message=f"Rows of {layer} move by {100 * ratio:.0f} % of their length in a step, and back in the next "
            f"(cosine of consecutive gradients {cosine:.2g}).",
        )
