"""A codebook of which next to nothing is used."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class CodebookCollapseDetector(Detector):
    """Batch after batch, all vectors are nearest to the same few codes.

    What:
        A codebook of a vector quantiser that uses one code, or a few of many, and does not spread.

    Why:
        Codes that are never nearest never get a gradient, so they stay where they are; the model has to get along with
        what a few codes can tell.

    Definition:
        codebook_perplexity (a count of codes) at most ``1 + 0.03 (M - 1)``, with M the number of codes that a batch
        could use (perplexity / codebook_usage), for 60 steps and 3 samples at least, and not above 1.5 times the first
        of these.

    Thresholds:
        A healthy codebook may begin so, and be down to one code for a few dozen steps, before it spreads: hence 60
        steps, and the growth. 3 % of the codes is a tenth of what published models call a low usage.

    Fixes:
        In the source: initialise from encoder outputs (k-means of a first batch), replace unused codes by encoder
        outputs, update by moving averages, normalise both sides.

    References:
        van den Oord, Vinyals, Kavukcuoglu 2017, arXiv:1711.00937. Dhariwal et al. 2020, arXiv:2005.00341, section 3.1
        (random restarts). Yu et al. 2022, arXiv:2110.04627 (factorised, normalised codes).
    """

    code = "codebook_collapse"
    signal = "codebook_perplexity"

    SHARE = 0.03
    MIN_STEPS, MIN_SAMPLES = 60, 3
    GROWTH = 1.5

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, float]] = {}
        self._num: dict[str, int] = {}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """Usage at this sample."""
        used = sample.layers.signal(self.signal) if sample.layers is not None else {}
        if sample.layers is None or not used:
            return None
        found: list[Finding] = []
        for layer, perplexity in used.items():
            usage = sample.layers.get(layer, "codebook_usage")
            if not (math.isfinite(perplexity) and math.isfinite(usage) and usage > 0):
                continue
            available = perplexity / usage
            bound = 1 + self.SHARE * (available - 1)
            began, first = self._first.setdefault(layer, (sample.step, perplexity))
            if perplexity > bound or perplexity > self.GROWTH * first:
                self._first.pop(layer)
                self._num.pop(layer, None)
                continue
            self._num[layer] = self._num.get(layer, 0) + 1
            if sample.step - began >= self.MIN_STEPS and self._num[layer] >= self.MIN_SAMPLES:
                found.append(self._finding(layer, perplexity, available, bound, began))
        return found

    def _finding(self, layer: str, perplexity: float, available: float, bound: float, began: int) -> Finding:
        return Finding(
            state="collapsed",
            severity=Severity.WARNING,
            layer=layer,
            evidence=(
                Measure(
                    name="codebook_perplexity", value=perplexity, baseline=available, threshold=bound, unit="codes"
                ),
                Measure(name="first_step", value=float(began), unit="step"),
            ),
            message=f"Since step {began} each batch uses {perplexity:.3g} codes of {layer} (perplexity), of the "
            f"{available:.0f} that it could use, and they grow no more.",
        )
