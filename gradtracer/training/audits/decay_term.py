"""The decay term of an update beside its gradient term."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradtracer.records import AuditFinding
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext
from gradtracer.training.statistics import norms

_DECOUPLED = ("AdamW", "SGDW", "Lion", "LAMB", "Adafactor")


@AUDITS.register
class DecayTerm(Audit):
    """Records how much of each layer's update is weight decay.

    What:
        The share of the weights that decay takes away at each step, and the decay term over the gradient.

    Why:
        Where decay beats the gradient the weights shrink whatever the data say.

    Definition:
        With decay w_d and rate eta, for the parameters that have a decay: signal decay_per_step =
        ``eta w_d / (1 - mu)`` (share of the weights a step, with momentum mu; for decoupled decay and for plain
        gradient descent), signal decay_over_gradient = ``w_d ||w|| / ||g||`` where decay is added to the
        gradient. No units. Nothing is found by this audit alone; the
        rule weights_decay_away reads the signals.

    Thresholds:
        None here.

    Fixes:
        None here.

    References:
        Loshchilov & Hutter 2019, arXiv:1711.05101, section 2.
    """

    code = "decay_term"

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Record the decay term of each layer."""
        decoupled = type(optimizer).__name__ in _DECOUPLED
        adaptive = not decoupled and "betas" in optimizer.param_groups[0]
        by_layer: dict[str, list[Tensor]] = {}
        rates: dict[str, float] = {}
        for group in optimizer.param_groups:
            decay = float(group.get("weight_decay") or 0.0)
            if decay <= 0:
                continue
            for p in group["params"]:
                layer = context.layer_of.get(id(p))
                if layer is not None and p.grad is not None and not p.grad.is_sparse and p.dim() > 1:
                    by_layer.setdefault(layer, []).append(p)
                    rates[layer] = decay
                    if not adaptive:
                        kept = 0.0 if decoupled else min(float(group.get("momentum") or 0.0), 0.999)
                        context.record(layer, "decay_per_step", decay * float(group["lr"]) / (1.0 - kept))
        if decoupled:
            return ()
        for layer, parameters in by_layer.items():
            weights = torch.linalg.vector_norm(norms([p.detach() for p in parameters]))
            gradients = torch.linalg.vector_norm(norms([p.grad for p in parameters if p.grad is not None]))
            context.record(layer, "decay_over_gradient", rates[layer] * weights / gradients.clamp_min(1e-30))
        return ()
