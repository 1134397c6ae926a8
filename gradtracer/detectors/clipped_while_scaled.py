"""Gradients that were clipped before they were unscaled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, Severity
from gradtracer.samples import Sample
from gradtracer.signals import LOSS_LAYER


@DETECTORS.register
class ClippedWhileScaled(Detector):
    """The gradient norm times the loss scale is one constant: a clipping threshold that met scaled gradients.

    What:
        Loops that clip between scaling and unscaling.

    Why:
        Scaled gradients are larger by some 65,536, so every one is clipped, and unscaling then divides what is left:
        updates are next to nothing, or, under Adam, all information on the size of the gradient is lost.

    Definition:
        ``c = ||g|| s`` with the gradient norm as the optimizer receives it and the loss scale s, no unit. All must hold
        at five sampled steps in a row: c within 0.1 % of the first, s >= 1024, ||g|| < 0.01, 1e-3 <= c <= 1e3.

    Thresholds:
        Gradient norms of different batches agree to 0.1 % only where they are clipped. Properly clipped ones have a
        norm of the threshold itself; thresholds lie between 0.001 and 1000, never near 1e-5.

    Fixes:
        None that is live: call scaler.unscale_(optimizer) before clipping.

    References:
        PyTorch documentation, "Automatic mixed precision examples", section "Gradient clipping".
    """

    code = "clipped_while_scaled"
    signal = "grad_norm"

    IN_A_ROW = 5
    AGREEMENT = 1e-3
    MIN_SCALE = 1024.0
    SMALL_NORM = 1e-2
    THRESHOLDS = (1e-3, 1e3)

    def __init__(self) -> None:
        self._constant = math.nan
        self._since = 0
        self._streak = 0

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The norm and the scale at a sampled step."""
        scale = sample.layers.get(LOSS_LAYER, "loss_scale") if sample.layers is not None else math.nan
        if not scale > 0 or not math.isfinite(sample.grad_norm):
            return None
        constant = scale * sample.grad_norm
        low, high = self.THRESHOLDS
        if not (scale >= self.MIN_SCALE and sample.grad_norm < self.SMALL_NORM and low <= constant <= high):
            self._streak = 0
            return ()
        if self._streak and abs(constant - self._constant) <= self.AGREEMENT * self._constant:
            self._streak += 1
        else:
            self._constant, self._since, self._streak = constant, sample.step, 1
        if self._streak < self.IN_A_ROW:
            return ()
        return [
            Finding(
                state="clipped",
                severity=Severity.WARNING,
                confidence=0.95,
                evidence=(
                    Measure(name="grad_norm", value=sample.grad_norm),
                    Measure(name="loss_scale", value=scale),
                ),
                message=f"The gradient norm is {sample.grad_norm:.3g} at every step, {self._constant:.4g} over the "
                f"loss scale of {scale:g}: it was clipped before it was unscaled.",
                since=self._since,
            )
        ]
