"""Whether targets lie within what their loss accepts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.audits._loss import BINARY, loss_nodes, operands
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph, operation_of, saved


@AUDITS.register
class TargetRange(Audit):
    """Targets lie outside of what their loss accepts.

    What:
        Binary cross-entropy with targets beyond [0, 1], such as a mask in {0, 255} or {-1, 1}; a soft-margin loss
        with targets other than -1 and 1; a Poisson likelihood with counts below 0.

    Why:
        The loss has no lower bound there: it falls for ever while nothing useful is learnt, and nothing raises.

    Definition:
        Smallest and largest element of the target that the loss's graph keeps, against the loss's domain. For the
        Poisson likelihood exp(x) - t x the target is what the same x is multiplied by.

    Thresholds:
        A quarter beyond [0, 1] for binary cross-entropy: noisy labels up to 1.2 are a known trick for discriminators,
        and rounding stays far below; less is `info`. Otherwise the domain itself.

    Fixes:
        In the source: scale the target, or take a loss that fits it.

    References:
        PyTorch documentation, torch.nn.BCELoss: "the targets y should be numbers between 0 and 1".
    """

    code = "target_range"
    reads_parts = True

    SLACK = 0.25

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Look at the targets of the losses."""
        for loss in loss_nodes(graph):
            target = loss.target
            if target is None or not target.numel() or not target.is_floating_point():
                continue
            low, high = float(target.min()), float(target.max())
            if loss.operation in BINARY and (low < -1e-3 or high > 1 + 1e-3):
                severe = low < -self.SLACK or high > 1 + self.SLACK
                yield self._found(context, graph, low, high, "[0, 1]", "binary cross-entropy", severe)
            elif loss.operation == "SoftMarginLoss" and bool((target.abs() != 1).any()):
                yield self._found(context, graph, low, high, "{-1, 1}", "the soft-margin loss", True)
        yield from self._counts(context, graph)

    def _counts(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        for node in graph.expression:
            if operation_of(node) != "Sub" or len(operands(node)) != 2:
                continue
            first, second = operands(node)
            if operation_of(first) != "Exp" or operation_of(second) != "Mul":
                continue
            target = saved(second, "self")
            target = target if isinstance(target, Tensor) else saved(second, "other")
            if not isinstance(target, Tensor) or target.requires_grad or not target.numel():
                continue
            if operands(first)[:1] != operands(second)[:1]:
                continue
            low, high = float(target.detach().min()), float(target.detach().max())
            if low < 0 and torch.isfinite(target).all():
                yield self._found(context, graph, low, high, "[0, inf)", "the Poisson likelihood", True)

    def _found(
        self, context: AuditContext, graph: LossGraph, low: float, high: float, domain: str, loss: str, severe: bool
    ) -> AuditFinding:
        return finding(
            context, "target_out_of_range",
            f"Targets reach from {low:.4g} to {high:.4g}; {loss} takes {domain}.",
            severity=Severity.WARNING if severe else Severity.INFO,
            measures=(Measure(name="target_min", value=low), Measure(name="target_max", value=high)),
            source=graph.computed_at,
        )  # fmt: skip
