"""Gradients that grow out of proportion."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors._depth import on_the_path
from gradtracer.detectors._running import BrokenPromises, GeometricLevel, LossScale, SustainedRise
from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import GradientThresholds, Measure, ModelDescription, Observation, Severity
from gradtracer.samples import LayerTable, Sample


@DETECTORS.register
class ExplodingGradient(Detector):
    """The gradient is out of proportion to weights and loss, or grows a hundredfold and takes the loss with it.

    What:
        Layers (recurrent ones above all) whose gradient makes the loss hypersensitive to their weights, and jumps of
        the whole gradient that wreck the run.

    Why:
        One such step throws the weights far away; what follows is a loss that jumps, or NaN.

    Definition:
        Elasticity ``E_l = ||g_l|| ||w_l|| / |loss|``: by how many percent the loss may change when the layer's weights
        change by one percent; and the change that this step allows, ``P_l = ||g_l|| ||update_l|| / |loss|``. No units.
        A layer explodes where
        (1) E_l >= 100 and P_l >= 8, and within 3 steps the loss rises by ``P_l |loss|`` or more or is not finite, or
        (2) E_l >= 100 and ||g_l|| > 1e3 at three sampled steps in a row, once 10 steps have been made;
        the run explodes where
        (3) the norm of the whole gradient is at least 100 times its geometric mean over the last 20 steps, and within
        10 steps the loss or a gradient is not finite (`critical`), or the loss rises above all of its last 32 values
        and stays there for 6 steps (`warning`).
        Embeddings and normalisations are left out of (1) and (2). |loss| is its exponential mean over 20 steps, at
        least the newest and at least a tenth of what the loss has gained since the start.

    Thresholds:
        A function that is homogeneous of degree k in a layer's weights has an elasticity of k (Euler), so a
        feed-forward layer has about 1 and a recurrent one at most its number of time steps; 100 is beyond what either
        needs. 8 and the rise of the loss tell where a network diverges, see update_ratio_too_high. 1e3,
        `GradientThresholds`, is absolute, so it never decides alone. 100 in (3): mini-batch gradient norms are
        heavy-tailed, and even there a factor of 10 is usual and harmless, hence also the effect on the loss, whose
        chance without a cause is 1 / C(38, 6) = 4e-7.

    Fixes:
        clip_grad_norm at about the usual norm; rollback if weights are already damaged; a lower learning rate; for a
        recurrent layer orthogonal initialisation or a gated cell.

    References:
        Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063, sections 2 and 3.2. Philipp, Song, Carbonell 2017,
        arXiv:1712.05577 (scale-free measures of explosion).
    """

    code = "exploding_gradient"
    signal = "grad_norm"

    HYPERSENSITIVE = 100.0
    UNSTABLE_CHANGE = 8.0
    GROWTH = 100.0
    AFTERMATH_STEPS = 10
    MIN_BASELINE = 10
    NUM_IN_A_ROW = 3

    def __init__(self, thresholds: GradientThresholds | None = None) -> None:
        self._large = (thresholds or GradientThresholds()).exploding
        self._types: dict[str, str] = {}
        self._scale = LossScale()
        self._level = GeometricLevel(20)
        self._rise = SustainedRise()
        self._streaks: dict[str, list[int]] = {}
        """Steps in a row at which a layer was hypersensitive with a large norm, the last few."""
        self._promises: BrokenPromises[Finding] = BrokenPromises()
        self._jump: tuple[int, float, float] | None = None
        """Step, norm and baseline of the last hundredfold growth."""

    def observe(self, observation: Observation) -> None:
        """Learn the layers' types."""
        if isinstance(observation, ModelDescription):
            self._types = {layer.name: layer.type for layer in observation.layers}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The run at every step, the layers at sampled ones."""
        self._scale.update(sample.loss)
        findings = self._after_a_jump(sample)
        findings.extend(finding for _, _, finding in self._promises.check(sample))
        if sample.layers is not None:
            findings.extend(self._layers(sample, sample.layers))
        elif not findings:
            return None
        return findings

    def _after_a_jump(self, sample: Sample) -> list[Finding]:
        norm, usual = sample.grad_norm, self._level.value
        rise = self._rise.update(sample.step, sample.loss) if math.isfinite(sample.loss) else None
        if self._level.count >= self.MIN_BASELINE and self.GROWTH * usual <= norm < math.inf:
            self._jump = (sample.step, norm, usual)
        self._level.update(norm)
        if self._jump is None:
            return []
        step, norm, usual = self._jump
        if sample.step > step + self.AFTERMATH_STEPS:
            self._jump = None
            return []
        broken = math.isinf(sample.loss) or math.isinf(sample.grad_norm)
        if not broken and (rise is None or abs(rise.first_step - step) > 2):
            return []
        return [
            Finding(
                state="exploding",
                severity=Severity.CRITICAL if broken else Severity.WARNING,
                confidence=0.9,
                evidence=(Measure(name="grad_norm", value=norm, baseline=usual, threshold=self.GROWTH * usual),),
                since=step,
                message=f"The gradient norm grew to {norm:.3g} at step {step}, {norm / usual:.0f} times its usual "
                f"{usual:.3g}, and the loss {'is no longer finite' if broken else 'rose and stayed up'}.",
            )
        ]

    def _layers(self, sample: Sample, table: LayerTable) -> list[Finding]:
        scale = self._scale.value
        if scale <= 0:
            return []
        weights, ratios = table.signal("weight_norm"), table.signal("update_ratio")
        findings: list[Finding] = []
        for layer, norm in table.signal("grad_norm").items():
            elasticity = norm * weights.get(layer, math.nan) / scale
            if not self.HYPERSENSITIVE <= elasticity < math.inf or not on_the_path(layer, self._types):
                self._streaks.pop(layer, None)
                continue
            change = elasticity * ratios.get(layer, math.nan)
            if change >= self.UNSTABLE_CHANGE:
                finding = self._finding(layer, norm, elasticity, change, since=sample.step)
                self._promises.note(sample, change * scale, finding)
            streak = self._streaks.setdefault(layer, [])
            if norm <= self._large:
                streak.clear()
                continue
            streak.append(sample.step)
            if len(streak) >= self.NUM_IN_A_ROW and sample.step >= self.MIN_BASELINE:
                findings.append(self._finding(layer, norm, elasticity, change, since=streak[0]))
        return findings

    def _finding(self, layer: str, norm: float, elasticity: float, change: float, since: int) -> Finding:
        finite = math.isfinite(change)
        return Finding(
            state="exploding",
            severity=Severity.WARNING,
            layer=layer,
            confidence=0.9,
            evidence=(
                Measure(name="elasticity", value=elasticity, threshold=self.HYPERSENSITIVE),
                Measure(
                    name="predicted_relative_loss_change",
                    value=change if finite else None,
                    threshold=self.UNSTABLE_CHANGE,
                    num_non_finite=0 if finite else 1,
                ),
                Measure(name="grad_norm", value=norm),
            ),
            message=f"A change of {layer} by 1 % may change the loss by {elasticity:.3g} %: its gradient norm is "
            f"{norm:.3g}.",
            since=since,
        )
