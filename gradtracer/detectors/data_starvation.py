"""Steps that wait for data."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class DataStarvation(Detector):
    """Most of the time passes between the steps.

    What:
        A loader that is slower than the model: one worker, decoding or augmentation in the training thread, a slow
        disk.

    Why:
        The hardware idles; the run takes a multiple of the time it needs.

    Definition:
        Over the last 10 to 20 sampled steps, the first three of the run left out: the median of ``data_wait_s`` is at
        least 5 ms (unit: seconds), and at least 0.6 of the median ``step_time_s`` of the last 32 steps that were not
        sampled (reading makes a sampled one slower).

    Thresholds:
        At 0.6 the loop would run 2.5 times as fast on waiting data. Below 5 ms a step is dominated by the cost of
        calling Python. The first steps start workers and fill caches. Medians pass over checkpoints and logging.

    Fixes:
        In the source: num_workers, pin_memory, prefetching, decoding ahead of time.

    References:
        Mohan, Phanishayee, Raniwala, Chidambaram 2021, PVLDB 14(5) (data stalls in DNN training).
    """

    code = "data_starvation"
    signal = "data_wait_s"

    FIRST = 3
    MIN_SAMPLES, MAX_SAMPLES = 10, 20
    MIN_WAIT_S = 0.005
    SHARE = 0.6

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=self.MAX_SAMPLES)
        self._times: deque[float] = deque(maxlen=32)

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """How long the last sampled steps waited."""
        if sample.step < self.FIRST:
            return None
        if sample.layers is None:
            if math.isfinite(sample.step_time_s):
                self._times.append(sample.step_time_s)
            return None
        wait = sample.layers.get("(input)", "data_wait_s")
        if not math.isfinite(wait):
            return None
        self._waits.append(wait)
        if len(self._waits) < self.MIN_SAMPLES or len(self._times) < self.MIN_SAMPLES:
            return []
        usual = median(self._waits)
        share = min(1.0, usual / max(median(self._times), 1e-9))
        if usual < self.MIN_WAIT_S or share < self.SHARE:
            return []
        return [
            Finding(
                state="starved",
                severity=Severity.WARNING,
                confidence=0.9,
                evidence=(
                    Measure(name="data_wait_s", value=usual, threshold=self.MIN_WAIT_S, unit="s"),
                    Measure(name="wait_share", value=share, threshold=self.SHARE),
                ),
                message=f"{share:.0%} of the time passes before the first layer runs: {usual * 1e3:.3g} ms a step.",
            )
        ]
