"""Scaled gradients where unscaled ones are meant."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure
from gradtracer.training.audits._sampling import Later, has_dense_gradient, parameters_of, thin
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph
from gradtracer.training.stack import calling_line


@AUDITS.register
class AmpOrder(Audit):
    """Whether an optimizer gets gradients that are still multiplied by the loss scale.

    What:
        Loops that scale the loss and then call `optimizer.step()` themselves, so that nothing unscales the gradients.

    Why:
        Updates are larger by the loss scale (65,536 at first), or, under an optimizer with moments, never checked for
        infinities.

    Definition:
        gradients_still_scaled (`warning`): the loss was multiplied by a scale of at least 2, and a thin sample of the
        gradient is at the update, bit for bit, what backward left (not all zero), at three sampled updates; not where
        the optimizer unscales in its kernel (`grad_scale`).

    Thresholds:
        Unscaling divides every element by at least 2, so equality cannot happen by chance.

    Fixes:
        None that is live: call scaler.step(optimizer) in place of optimizer.step(); before clipping
        scaler.unscale_(optimizer).

    References:
        PyTorch documentation, "Automatic mixed precision examples", section "Gradient clipping".
    """

    code = "amp_order"

    IN_A_ROW = 3

    def __init__(self) -> None:
        self._scale: Tensor | None = None
        self._probe: nn.Parameter | None = None
        self._raw: Tensor | None = None
        self._verdicts: Later[int] = Later()
        self._streak: list[int] = []

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Note the scale."""
        self._scale = graph.loss_scale
        return ()

    def on_backward(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Note the gradient as backward left it."""
        self._raw = None
        if self._scale is None:
            return ()
        if self._probe is None or not has_dense_gradient(self._probe):
            held = [p for o in context.optimizers for p in parameters_of(o) if has_dense_gradient(p)]
            self._probe = max(held, key=lambda p: p.numel(), default=None)
        if self._probe is not None and self._probe.grad is not None:
            self._raw = thin(self._probe.grad)
        return ()

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Compare with what the optimizer gets."""
        probe, raw, scale = self._probe, self._raw, self._scale
        self._raw = None
        unscales_itself = getattr(optimizer, "grad_scale", None) is not None
        if probe is None or raw is None or scale is None or unscales_itself or not has_dense_gradient(probe):
            return
        if not any(p is probe for p in parameters_of(optimizer)):
            return
        assert probe.grad is not None
        same = (thin(probe.grad) == raw).all() & (raw != 0).any() & (scale.to(raw.device) >= 2).all()
        self._verdicts.put(context.step, torch.stack([same.float(), scale.detach().reshape(()).to(raw.device).float()]))
        for step, values in self._verdicts.take():
            still, factor = values.tolist()
            self._streak = [*self._streak, step] if still else []
            if len(self._streak) == self.IN_A_ROW:
                yield finding(
                    context,
                    "gradients_still_scaled",
                    f"The optimizer gets gradients that are still multiplied by the loss scale of {factor:g}.",
                    measures=[Measure(name="loss_scale", value=factor, threshold=2.0)],
                    source=calling_line("optimizer.step"),
                ).model_copy(update={"step": self._streak[0]})
