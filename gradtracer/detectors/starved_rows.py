"""Rare embedding rows whose look-ups count for nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class StarvedRows(Detector):
    """A look-up of a rare row yields next to no gradient, one of a frequent row does.

    What:
        An embedding table in which frequent rows take the gradient, beyond their share of look-ups.

    Why:
        Rare rows keep their initial values: the model knows only what is common.

    Definition:
        rare_row_gradient (no unit: gradient a look-up of rare rows over that of the most drawn ones) below 0.003 at
        every sample over 60 steps, 6 samples at least.

    Thresholds:
        Every look-up of an untrained row asks for a change of the same size, so the ratio is about 1, and above it once
        frequent rows are learned. A rare row that is learned as well has less gradient, but three thousandths of what
        frequent ones still have, all along, is no matter of being learned.

    Fixes:
        In the source: loss weights by frequency, per-row rates (Adagrad), sampling that favours rare rows.

    References:
        Pezeshki et al. 2021, arXiv:2011.09468. Duchi, Hazan, Singer 2011 (Adagrad).
    """

    code = "starved_rows"
    signal = "rare_row_gradient"

    RATIO = 0.003
    MIN_STEPS, MIN_SAMPLES = 60, 6

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._num: dict[str, int] = {}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The ratio of the tables at this sample."""
        ratios = sample.layers.signal(self.signal) if sample.layers is not None else {}
        if not ratios:
            return None
        found: list[Finding] = []
        for layer, ratio in ratios.items():
            if not math.isfinite(ratio) or ratio >= self.RATIO:
                self._since.pop(layer, None)
                self._num.pop(layer, None)
                continue
            began = self._since.setdefault(layer, sample.step)
            self._num[layer] = self._num.get(layer, 0) + 1
            if sample.step - began >= self.MIN_STEPS and self._num[layer] >= self.MIN_SAMPLES:
                found.append(self._finding(layer, ratio, began))
        return found

    def _finding(self, layer: str, ratio: float, began: int) -> Finding:
        return Finding(
            state="starved",
            severity=Severity.WARNING,
            layer=layer,
            evidence=(
                Measure(name="rare_row_gradient", value=ratio, baseline=1.0, threshold=self.RATIO),
                Measure(name="first_step", value=float(began), unit="step"),
            ),
            message=f"Since step {began} a look-up of a rare row of {layer} yields {ratio:.2g} times the gradient that "
            "one of a frequent row does.",
        )
