"""Whether the model's last activation fits the loss that it feeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.audits._loss import BINARY, CLASSIFIERS, DISTANCES, loss_nodes, operands
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph, operation_of, producer_of, saved

_WORDS = {
    "Softmax": "a softmax", "Sigmoid": "a sigmoid", "Tanh": "a tanh", "Relu": "a ReLU", "LogSoftmax": "a log-softmax",
    "LogSigmoid": "a log-sigmoid",
}  # fmt: skip
_RANGES = {"Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Relu": (0.0, float("inf"))}


@AUDITS.register
class OutputActivation(Audit):
    """The model's last activation does not fit the loss.

    What:
        A softmax, sigmoid, tanh or ReLU that feeds a loss which applies its own softmax or sigmoid; a loss that takes
        log-probabilities and is given probabilities or scores; a bounded output whose targets lie beyond the bound.

    Why:
        Probabilities taken for scores lie within 1 of each other, so the loss of C classes cannot fall below
        ln(1 + (C - 1) / e) and the gradient is a fraction of what it should be.

    Definition:
        In the graph of the loss, through operations that only reorder values: softmax, sigmoid, tanh or ReLU directly
        before log-softmax or before binary cross-entropy with logits; negative log-likelihood whose input exceeds 0
        or whose rows exp(x) do not sum to 1; the product target * input of the Kullback-Leibler divergence (a target
        whose rows sum to 1) whose input comes from a softmax or sigmoid, or from no logarithm at all; an output in
        [a, b] under a squared or absolute loss with over a tenth of its targets outside of it (count).

    Thresholds:
        Structure needs none. Rows of probabilities sum to 1 within 2 % in half precision. A tenth of the targets:
        fewer may be outliers that a bounded output rightly ignores.

    Fixes:
        In the source: give the loss the scores, or take the loss that fits.

    References:
        PyTorch documentation: CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss and KLDivLoss each state what input they
        expect.
    """

    code = "output_activation"
    reads_parts = True

    _REORDERED_SUM = 0.02

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Look at what feeds the losses."""
        region = set(graph.expression)
        for node in graph.nodes:
            operation = operation_of(node)
            # Inside the model a softmax of attention may meet others; at the loss it must not.
            if operation == "LogSoftmax" and (node in region or self._feeds_loss(graph, node)):
                yield from self._before_log_softmax(context, graph, node)
            elif operation == "Mul" and node in region:
                yield from self._divergence(context, graph, node)
        for loss in loss_nodes(graph):
            if loss.operation == "BinaryCrossEntropyWithLogits":
                yield from self._before_logits(context, graph, loss.node)
            elif loss.operation in CLASSIFIERS:
                yield from self._likelihood(context, graph, loss.node)
            elif loss.operation in DISTANCES or loss.operation in BINARY:
                yield from self._range(context, graph, loss.node, loss.target)

    def _feeds_loss(self, graph: LossGraph, node: Any) -> bool:
        for _ in range(8):
            consumers = graph.consumers.get(node, [])
            if any(operation_of(c) in CLASSIFIERS for c in consumers):
                return True
            if len(consumers) != 1:
                return False
            node = consumers[0]
        return False

    def _before_log_softmax(self, context: AuditContext, graph: LossGraph, node: Any) -> Iterable[AuditFinding]:
        before = producer_of(node.next_functions[0][0]) if node.next_functions else None
        if before is None or operation_of(before) not in ("Softmax", "Sigmoid", "Tanh", "Relu"):
            return
        yield self._found(
            context, graph, before, "activation_into_cross_entropy",
            f"{_WORDS[operation_of(before)]} feeds a loss that applies its own log-softmax (cross_entropy).",
        )  # fmt: skip

    def _before_logits(self, context: AuditContext, graph: LossGraph, node: Any) -> Iterable[AuditFinding]:
        before = producer_of(node.next_functions[0][0]) if node.next_functions else None
        if before is None or operation_of(before) not in ("Softmax", "Sigmoid", "Tanh", "Relu", "LogSigmoid"):
            return
        yield self._found(
            context, graph, before, "activation_into_bce_with_logits",
            f"{_WORDS[operation_of(before)]} feeds a loss that applies its own sigmoid "
            "(binary_cross_entropy_with_logits).",
        )  # fmt: skip

    def _likelihood(self, context: AuditContext, graph: LossGraph, node: Any) -> Iterable[AuditFinding]:
        kept = saved(node, "self")
        before = producer_of(node.next_functions[0][0]) if node.next_functions else None
        if not isinstance(kept, Tensor) or before is None or operation_of(before) in ("LogSoftmax", "LogSigmoid"):
            return
        values = kept.detach()
        if values.numel() == 0 or not bool(torch.isfinite(values).all()):
            return
        axis = 0 if values.dim() == 1 else 1
        total = values.double().exp().sum(dim=axis)
        largest, off = float(values.max()), float((total - 1).abs().median())
        if largest <= 1e-4 and off <= self._REORDERED_SUM:
            return
        kind = operation_of(before)
        if kind not in ("Softmax", "Sigmoid") and largest <= 1e-4:
            return  # log-probabilities that are not normalised over the classes may be meant
        what = _WORDS.get(kind, f"{before.name()}, no logarithm,")
        yield self._found(
            context, graph, before, "nll_of_no_log_probability",
            f"{what} feeds a negative log-likelihood, which takes log-probabilities: its input reaches "
            f"{largest:.3g}, and exp of its rows sums to {1 + off:.3g}.",
            Measure(name="largest_log_probability", value=largest, threshold=0.0),
        )  # fmt: skip

    def _divergence(self, context: AuditContext, graph: LossGraph, node: Any) -> Iterable[AuditFinding]:
        # kl_div(input, target) = xlogy(target, target) - target * input, and the first term is a constant.
        target = saved(node, "self")
        if not isinstance(target, Tensor):
            target = saved(node, "other")
        consumers = graph.consumers.get(node, [])
        if (
            not isinstance(target, Tensor)
            or target.requires_grad
            or target.dim() < 2
            or len(consumers) != 1
            or operation_of(consumers[0]) != "Sub"
            or len(consumers[0].next_functions) < 2
            or consumers[0].next_functions[0][0] is not None
            or len(operands(node)) != 1
        ):
            return
        rows = target.detach()
        if not bool(torch.isfinite(rows).all()) or float(rows.min()) < 0:
            return
        if not any(float((rows.double().sum(dim=d) - 1).abs().max()) <= self._REORDERED_SUM for d in (1, -1)):
            return
        before = producer_of(operands(node)[0])
        if before is None:
            return
        kind = operation_of(before)
        if kind in ("Softmax", "Sigmoid"):
            what = f"{_WORDS[kind]} feeds a Kullback-Leibler divergence, which takes log-probabilities (log_softmax)."
        elif graph.own_layer(before) is not None and kind in ("Addmm", "Mm", "Linear"):
            what = "Scores feed a Kullback-Leibler divergence, which takes log-probabilities (log_softmax)."
        else:
            return
        yield self._found(context, graph, before, "divergence_of_no_log_probability", what)

    def _range(
        self, context: AuditContext, graph: LossGraph, node: Any, target: Tensor | None
    ) -> Iterable[AuditFinding]:
        before = producer_of(node.next_functions[0][0]) if node.next_functions else None
        if before is None or target is None or operation_of(node) in BINARY or target.numel() == 0:
            return
        low, high = _RANGES.get(operation_of(before), (None, None))
        if low is None or high is None:
            return
        slack = 0.0 if low == high else 0.05
        outside = float(((target < low - slack) | (target > high + slack)).double().mean())
        if outside <= 0.1:
            return
        yield self._found(
            context, graph, before, "output_cannot_reach_target",
            f"{outside:.0%} of the targets lie outside of what {_WORDS[operation_of(before)]} can put out.",
            Measure(name="share_outside", value=outside, threshold=0.1),
        )  # fmt: skip

    def _found(
        self, context: AuditContext, graph: LossGraph, before: Any, code: str, detail: str, *measures: Measure
    ) -> AuditFinding:
        layer = graph.module_of.get(before) or graph.layer_at(before)
        return finding(
            context, code, detail[0].upper() + detail[1:], layer=layer, severity=Severity.WARNING, measures=measures,
            source=graph.computed_at,
        )  # fmt: skip
