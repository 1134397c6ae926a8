"""Attention that narrows to single keys while the loss gets no better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class AttentionCollapse(Detector):
    """Attention narrows to single keys, and the loss pays for it.

    What:
        An attention layer whose entropy was wide and is near 0, in a run whose loss has lost what it had gained.

    Why:
        Logits that grow without bound saturate the softmax; its gradient vanishes, and the layer stays where it is.
        Sharp attention by itself is what a copying head learns, so the loss must speak too.

    Definition:
        attention_entropy (a share of the log of the keys, without unit) was at least 0.4 at some sample and is below
        0.1 at three samples in a row, while the median of the last 16 losses gives back at least half of what the best
        median of 16 had gained over the first 16, or that best gained nothing (below 2 % of the first).

    Thresholds:
        Below 0.1 the largest weight is above 0.9 for up to a few dozen keys. A head that learned where to look lowers
        the loss at that time, and a run that has converged keeps what it gained; half of the gain lost over 16 steps is
        beyond the noise of batches.

    Fixes:
        set_learning_rate; in the source: normalise queries and keys, warm up.

    References:
        Zhai et al. 2023, arXiv:2303.06296. Dehghani et al. 2023, arXiv:2302.05442 (normalised queries and keys).
    """

    code = "attention_collapse"
    signal = "attention_entropy"
    enter_after = 3

    WIDE, NARROW = 0.4, 0.1
    WINDOW = 16

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._first = self._best = math.inf
        self._widest: dict[str, float] = {}
        self._left_wide_at: dict[str, int] = {}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """Entropies of this sample against their past, and the loss against its best."""
        if math.isfinite(sample.loss):
            self._losses = [*self._losses[1 - self.WINDOW :], sample.loss]
            if len(self._losses) == self.WINDOW:
                now = median(self._losses)
                self._first = now if math.isinf(self._first) else self._first
                self._best = min(self._best, now)
        if sample.layers is None:
            return None
        entropies = sample.layers.signal(self.signal)
        if not entropies:
            return None
        found: list[Finding] = []
        for layer, entropy in entropies.items():
            if not math.isfinite(entropy):
                continue
            self._widest[layer] = max(self._widest.get(layer, 0.0), entropy)
            if entropy >= self.WIDE:
                self._left_wide_at[layer] = sample.step
            elif entropy < self.NARROW <= self.WIDE <= self._widest[layer] and self._loss_pays():
                found.append(self._finding(layer, entropy))
        return found

    def _loss_pays(self) -> bool:
        if len(self._losses) < self.WINDOW or math.isinf(self._first):
            return False
        now, gained = median(self._losses), self._first - self._best
        return gained < 0.02 * abs(self._first) or now - self._best >= 0.5 * gained

    def _finding(self, layer: str, entropy: float) -> Finding:
        return Finding(
            state="collapsed",
            severity=Severity.WARNING,
            layer=layer,
            evidence=(
                Measure(name="attention_entropy", value=entropy, baseline=self._widest[layer], threshold=self.NARROW),
                Measure(name="loss", value=median(self._losses), baseline=self._best),
            ),
            message=f"The attention of {layer} has narrowed to single keys (entropy {entropy:.2g} of its maximum, from "
            f"{self._widest[layer]:.2g}; it was last wide at step {self._left_wide_at.get(layer, 0)}), and the loss is "
            "no better for it.",
        )
