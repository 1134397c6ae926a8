"""Gradients that shrink layer by layer toward the input."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors._depth import DepthProfile, depth_profile
from gradtracer.detectors._running import LossHistory
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import Measure, ModelDescription, Observation, Severity
from gradtracer.samples import LayerTable, Sample


@DETECTORS.register
class VanishingGradient(Detector):
    """The gradient falls by orders of magnitude from layer to layer toward the input, and the first layers stand still.

    What:
        The layers near the input whose gradient has faded on its way through the layers above, one event a layer.

    Why:
        These layers keep their random weights however long the run lasts: what the later layers learn rests on random
        features. Saturating activations (sigmoid, tanh) and weights that are too small do this.

    Definition:
        ``r_l = sqrt(mean(g_l^2))``, the RMS of the gradient over the layer's parameters (loss per unit of weight),
        along the forward order without embeddings and normalisations. All must hold:
        (1) a robust line through log10 r_l falls by at least 3 decades over the depth (Theil-Sen slope times depth),
        (2) it falls at nearly every layer (Kendall tau >= 0.6) and no single place makes more than 0.7 of the fall,
        (3) the layer and every layer before it have r_l <= 1e-3 of that near the output,
        (4) it costs: the layer's update ratio is at most 1e-3 of that near the output; or, where an adaptive optimizer
        hides that by rescaling, the loss has moved by less than a tenth of its first level in 50 steps.
        All are ratios: no rescaling of the loss changes them.

    Thresholds:
        1e-3: a layer that moves a thousand times slower than the last ones needs a thousand runs to do its part. With
        the sigmoid's largest slope of 1/4 (Hochreiter 1991; Glorot & Bengio 2010) five layers reach it; layers of a
        healthy network differ by one or two decades. tau 0.6 and the share 0.7 tell a fade from a cut: a dead layer or
        a detached input makes one step, and is another fault. Four layers are the fewest that can show a trend.

    Fixes:
        None that is live. Change the source: ReLU or GELU in place of sigmoid or tanh, a normalisation or a residual
        connection around each block, Glorot or He initialisation.

    References:
        Hochreiter 1991, diploma thesis, chapter 4. Glorot & Bengio 2010, AISTATS, section 4.2. Pascanu, Mikolov, Bengio
        2013, arXiv:1211.5063, section 2.
    """

    code = "vanishing_gradient"
    signal = "grad_norm"
    enter_after = 3

    MIN_FALL_DECADES = 3.0
    MIN_TREND = 0.6
    MAX_SINGLE_STEP = 0.7
    NEGLIGIBLE = 1e-3
    STALL_STEPS = 50
    STALLED = 0.1

    def __init__(self) -> None:
        self._model: ModelDescription | None = None
        self._loss = LossHistory()

    def observe(self, observation: Observation) -> None:
        """Learn the forward order."""
        if isinstance(observation, ModelDescription):
            self._model = observation

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The layers that the gradient does not reach at a sampled step."""
        if math.isfinite(sample.loss):
            self._loss.update(sample.loss)
        if sample.layers is None:
            return None
        profile = depth_profile(sample.layers, self._model)
        if profile is None or profile.reference <= 0:
            return None
        if (
            profile.fitted_fall < self.MIN_FALL_DECADES
            or profile.trend < self.MIN_TREND
            or profile.largest_step_share > self.MAX_SINGLE_STEP
        ):
            return ()
        return [
            self._finding(layer, rms, ratio, profile)
            for layer, rms, ratio in self._starved(profile, sample.layers)
            if ratio is not None or self._stalled()
        ]

    def _starved(self, profile: DepthProfile, table: LayerTable) -> list[tuple[str, float, float | None]]:
        """Layers from the input on that have a negligible gradient; with their ratio of updates where it is, too."""
        ratios = table.signal("update_ratio")
        reference = max((ratios[n] for n in profile.layers[-2:] if math.isfinite(ratios.get(n, math.nan))), default=0.0)
        starved: list[tuple[str, float, float | None]] = []
        for layer, rms in zip(profile.layers, profile.rms, strict=True):
            if rms > self.NEGLIGIBLE * profile.reference:
                break
            ratio = ratios.get(layer, math.nan) / reference if reference > 0 else math.nan
            starved.append((layer, rms, ratio if ratio <= self.NEGLIGIBLE else None))
        return starved

    def _stalled(self) -> bool:
        loss = self._loss
        return loss.count >= self.STALL_STEPS and abs(loss.first - loss.best) < self.STALLED * abs(loss.first)

    def _finding(self, layer: str, rms: float, ratio: float | None, profile: DepthProfile) -> Finding:
        relative = rms / profile.reference
        evidence = [
            Measure(name="gradient_rms_relative_to_output", value=relative, threshold=self.NEGLIGIBLE),
            Measure(name="fall_over_depth", value=profile.fitted_fall, threshold=3.0, unit="decades"),
            Measure(name="depth_trend", value=profile.trend, threshold=self.MIN_TREND),
        ]
        if ratio is not None:
            evidence.append(
                Measure(name="update_ratio_relative_to_output", value=ratio, threshold=self.NEGLIGIBLE),
            )
        else:
            evidence.append(
                Measure(name="best_loss", value=self._loss.best, baseline=self._loss.first),
            )
        return Finding(
            state="vanishing",
            severity=Severity.WARNING,
            layer=layer,
            confidence=min(0.99, 0.5 + 0.5 * profile.trend),
            evidence=tuple(evidence),
            message=f"{layer} receives {relative:.1g} of the gradient that {profile.layers[-1]} does; it falls by "
            f"{profile.fitted_fall:.1f} decades over {len(profile.layers)} layers.",
        )
