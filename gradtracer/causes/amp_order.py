"""Clip, unscale and step come in the wrong order."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class AmpOrder(Cause):
    """Scaled gradients meet a clipping threshold, or an optimizer that takes them as they are.

    What:
        Mixed-precision loops that clip before `unscale_`, or that call `optimizer.step()` in place of
        `scaler.step(optimizer)`.

    Why:
        Clipped by a threshold that is 65,536 times too small, updates are next to nothing; not unscaled at all, they
        are as much too large.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the gradient norm is one constant over the loss scale
        (clipped_while_scaled): +9; the gradient at the update is, to the bit, what backward left under a loss scale
        (gradients_still_scaled): +9.
        Onset: the first such step.

    Thresholds:
        Both are read from the training: norms that agree to 0.1 % are clipped, and unscaling changes every bit:
        ln 8000 = 9.

    Fixes:
        None that is live: scaler.unscale_(optimizer), then clip, then scaler.step(optimizer).

    References:
        PyTorch documentation, "Automatic mixed precision examples", section "Gradient clipping".
    """

    code = "amp_order"
    title = "Clip, unscale and step are in the wrong order"
    prior = 0.01

    def consider(self, series: Series) -> Case | None:
        """Weigh scaled gradients where unscaled ones are meant."""
        clipped = warnings_of(series, "clipped_while_scaled")
        scaled = series.audit("gradients_still_scaled")
        if not clipped and not scaled:
            return None
        found = [evidence(clipped[0].message, 9.0, events=clipped)] if clipped else []
        if scaled:
            found.append(evidence(scaled[0].detail, 9.0, measures=scaled[0].measures))
        events = [*clipped, *(e for e in warnings_of(series, "audit") if e.to_state == "gradients_still_scaled")]
        return Case(
            evidence=found,
            onset_step=min([*(e.step for e in clipped), *(f.step for f in scaled)]),
            explanation=found[0].statement,
            event_ids=event_ids(events),
            source=scaled[0].source if scaled else None,
            advice="In this order: scaler.scale(loss).backward(), scaler.unscale_(optimizer), clip_grad_norm_, "
            "scaler.step(optimizer), scaler.update().",
        )
