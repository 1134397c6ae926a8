"""Gradient health per layer, by the absolute norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradtracer.detectors.base import DETECTORS, Detector, Finding
from gradtracer.records import GradientHealth, GradientThresholds, Measure, Severity
from gradtracer.samples import Sample

_ORDER = (GradientHealth.VANISHING, GradientHealth.HEALTHY, GradientHealth.SATURATED, GradientHealth.EXPLODING)


@DETECTORS.register
class GradientHealthDetector(Detector):
    """A layer's gradient leaves the range in which it is neither tiny nor large, or moves between such states.

    What:
        The state of each layer's gradient norm (healthy, vanishing, saturated, exploding, non_finite) and every
        transition between states, as one `info` event per layer and state.

    Why:
        The transition says when a layer's training changed character; the first layer to change is where to look.
        The state alone proves nothing: a sum-reduced loss has large gradients and trains well, so this rule never
        warns. The rules that warn compare the run with itself.

    Definition:
        ``||g_l||``, the Euclidean norm of the layer's gradient as the optimizer receives it, in units of loss per unit
        of weight. vanishing: below 1e-6; healthy: 1e-6 to 1; saturated: above 1; exploding: above 1e3. A state is left
        only when the norm is beyond its bound by a factor of 2, and an event is opened when three sampled steps in a
        row agree.

    Thresholds:
        1e-6, 1 and 1e3 are those of NeuralDBG's gradient health (`GradientThresholds`), kept so that its users read
        the same states. The factor 2 is the step-to-step spread of gradient norms of a mini-batch (McCandlish et al.
        2018 find noise of the order of the gradient itself), so that noise around a bound is no transition.

    Fixes:
        None by itself. Ask explain_failure when a warning stands beside it.

    References:
        NeuralDBG, "Gradient Health Monitoring". McCandlish, Kaplan, Amodei 2018, arXiv:1812.06162.
    """

    code = "gradient_health"
    signal = "grad_norm"
    enter_after = 3

    MARGIN = 2.0

    def __init__(self, thresholds: GradientThresholds | None = None) -> None:
        self._thresholds = thresholds or GradientThresholds()
        self._states: dict[str, GradientHealth] = {}
        self._from: dict[str, GradientHealth] = {}

    def assess(self, sample: Sample) -> Sequence[Finding] | None:
        """The layers that are not healthy at a sampled step."""
        if sample.layers is None:
            return None
        norms = sample.layers.signal("grad_norm")
        if not norms:
            return None
        findings: list[Finding] = []
        for layer, norm in norms.items():
            if norm == 0.0 and layer not in self._states:
                continue  # Nothing has flowed here yet: no norm of a gradient, but no gradient.
            before = self._states.get(layer)
            state = self._next(before, norm)
            if state is not before:
                self._states[layer] = state
                self._from[layer] = before or GradientHealth.HEALTHY
            if state is not GradientHealth.HEALTHY:
                findings.append(self._finding(layer, norm, state))
        return findings

    def _next(self, before: GradientHealth | None, norm: float) -> GradientHealth:
        state = self._thresholds.classify(norm)
        if before is None or state is before or GradientHealth.NON_FINITE in (before, state):
            return state
        # A norm that is beyond a bound by less than the margin has not left the state before.
        toward = norm * self.MARGIN if _ORDER.index(state) < _ORDER.index(before) else norm / self.MARGIN
        held = self._thresholds.classify(toward)
        if held is before:
            return before
        return state

    def _finding(self, layer: str, norm: float, state: GradientHealth) -> Finding:
        bound = {
            GradientHealth.VANISHING: self._thresholds.vanishing,
            GradientHealth.SATURATED: self._thresholds.saturated,
            GradientHealth.EXPLODING: self._thresholds.exploding,
        }.get(state)
        finite = math.isfinite(norm)
        shown = f"{norm:.3g}" if finite else "not finite"
        return Finding(
            state=state.value,
            severity=Severity.INFO,
            layer=layer,
            evidence=(
                Measure(
                    name="grad_norm",
                    value=norm if finite else None,
                    threshold=bound,
                    num_non_finite=0 if finite else 1,
                ),
            ),
            message=f"The gradient norm of {layer} is {shown}: {state.value}.",
            from_state=self._from[layer].value,
        )
