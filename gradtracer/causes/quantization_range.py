"""One outlier sets the scale of a tensor."""

from __future__ import annotations

from gradtracer.causes._reading import evidence
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class QuantizationRange(Cause):
    """A model that trains well and will lose its accuracy when it is quantized with one scale a tensor.

    What:
        Output channels, or factors that will be folded into them, of very different size.

    Why:
        The training is healthy; this is about what comes after it.

    Definition:
        Evidence, with its log-likelihood ratio in nats: channel_range (info): +3.5. Root: the layer with the largest
        ratio.

    Thresholds:
        Training cannot tell whether the model will be quantized, and how: the probability stays below that of a healthy
        run (3.5 = ln 33), and the question that settles it is asked in `advice`.

    Fixes:
        In the compression recipe: scales by channel.

    References:
        Nagel et al. 2019, arXiv:1906.04721. Krishnamoorthi 2018, arXiv:1806.08342.
    """

    code = "quantization_range"
    title = "One channel sets the range of a tensor"
    prior = 0.01

    def consider(self, series: Series) -> Case | None:
        """Weigh the largest channels."""
        found = series.audit("channel_range")
        if not found:
            return None
        worst = max(found, key=lambda f: f.measures[0].value or 0.0)
        return Case(
            evidence=[evidence(worst.detail, 3.5, measures=worst.measures)],
            layer=worst.layer,
            explanation=f"{worst.detail} Rounded to 8 bits with one scale for the tensor, the usual channels become "
            "zero.",
            source=worst.source,
            advice="Will the model be quantized with one scale a tensor? Then use a scale by output channel, or "
            "equalise the channels first. Otherwise nothing needs to change.",
        )
