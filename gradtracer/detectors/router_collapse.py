"""Experts that the router has given up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample


@DETECTORS.register
class RouterCollapseDetector(Detector):
    """Half of a mixture's experts or more receive no gradient.

    What:
        A router that sends all rows to the same experts, step after step.

    Why:
        The others keep their initial weights: the model has the cost of E experts and the capacity of the few.

    Definition:
        starved_expert_fraction (no unit) at least 0.5 at every sample over 60 steps and 3 samples at least.

    Thresholds:
        Half of the experts without a gradient in eight samples in a row, over and over: with balanced routing of n rows
        an expert goes without by chance in a share exp(-n/E) of the samples, so in eight in a row next to never, while
        specialised experts each see their part of any mixed batch. One idle expert of many is no collapse.

    Fixes:
        In the source: an auxiliary loss for balance, noise on the router's outputs, a capacity for each expert.

    References:
        Shazeer et al. 2017, arXiv:1701.06538, section 4. Fedus, Zoph, Shazeer 2022, arXiv:2101.03961. Wang et al. 2024,
        arXiv:2408.15664 (balance by bias).
    """

    code = "router_collapse"
    signal = "starved_expert_fraction"

    SHARE = 0.5
    MIN_STEPS, MIN_SAMPLES = 60, 3

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._num: dict[str, int] = {}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """Starved experts at this sample."""
        starved = sample.layers.signal(self.signal) if sample.layers is not None else {}
        if sample.layers is None or not starved:
            return None
        found: list[Finding] = []
        for layer, share in starved.items():
            if not math.isfinite(share) or share < self.SHARE:
                self._since.pop(layer, None)
                self._num.pop(layer, None)
                continue
            # The first value looks back on the samples before it.
            began = self._since.setdefault(layer, 0 if sample.step < 10 else sample.step)
            self._num[layer] = self._num.get(layer, 0) + 1
            if sample.step - began >= self.MIN_STEPS and self._num[layer] >= self.MIN_SAMPLES:
                top = sample.layers.get(layer, "routing_top_share")
                found.append(self._finding(layer, share, top, began))
        return found

    def _finding(self, layer: str, share: float, top: float, began: int) -> Finding:
        measures = [
            Measure(name="starved_expert_fraction", value=share, threshold=self.SHARE),
            Measure(name="first_step", value=float(began), unit="step"),
        ]
        if math.isfinite(top):
            measures.append(Measure(name="routing_top_share", value=top))
        return Finding(
            state="collapsed",
            severity=Severity.WARNING,
            layer=layer,
            evidence=tuple(measures),
            message=f"Since step {began} {100 * share:.0f} % of the experts behind {layer} receive no gradient"
            + (f"; {100 * top:.0f} % of the rows prefer one expert." if math.isfinite(top) else "."),
        )
