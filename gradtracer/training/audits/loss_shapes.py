"""Whether prediction and target of a loss have one shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.audits._loss import operands
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph, operation_of, saved, shape_of

_ELEMENTWISE = frozenset({"Sub", "Rsub", "Add", "Mul", "Div"})
_LOSSES = frozenset({"MseLoss", "SmoothL1Loss", "HuberLoss"})
_OF_A_RESIDUAL = frozenset({"Pow", "Abs", "Mul", "Square", "Neg", "SmoothL1Loss", "Log", "Cosh", "Log1P", "Clamp"})
_MEANS = frozenset({"Mean", "Sum"})
_MADE_A_COLUMN = frozenset({"Unsqueeze", "Index", "Expand"})


@AUDITS.register
class LossShapes(Audit):
    """Prediction and target broadcast against each other: each prediction is compared with every target.

    What:
        A prediction of shape [N, 1] and a target of shape [N] (or the other way round) in a difference or a squared,
        absolute or smooth loss; a column of weights times a row of losses.

    Why:
        The result is [N, N], its mean is finite and falls, and what minimises it is the mean of the targets for every
        input.

    Definition:
        In the loss expression: an elementwise operation, or a loss that expands its input, of one operand with a
        history and one without, whose result has N^2 elements, [N, N], where the first is a vector of N > 1 elements
        ([N], [N, 1] or [1, N]); and from there to the loss only functions of the residual and a mean over everything.

    Thresholds:
        None: the shapes are exact. An operand that was made a column by hand (unsqueeze, [:, None]) is compared with
        all others on purpose in pairwise losses, so that is `info`.

    Fixes:
        In the source: prediction.squeeze(-1) or target.unsqueeze(-1), so that both have one shape.

    References:
        PyTorch's own warning "Using a target size that is different to the input size". pytorch/pytorch documentation,
        Broadcasting semantics.
    """

    code = "loss_shapes"
    reads_parts = True

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Look for a vector that became a square."""
        for node in graph.expression:
            operation = operation_of(node)
            if operation in _LOSSES:
                yield from self._expanded(context, graph, node)
            elif operation in _ELEMENTWISE:
                yield from self._elementwise(context, graph, node)

    def _elementwise(self, context: AuditContext, graph: LossGraph, node: Any) -> Iterable[AuditFinding]:
        inputs = operands(node)
        result = shape_of(node)
        if len(inputs) != 1 or result is None or not self._reduces(graph, node):
            return
        operand = inputs[0]
        by_hand = operation_of(operand) in _MADE_A_COLUMN
        if operation_of(operand) == "Expand" and operands(operand):  # l1_loss and its like broadcast first
            operand = operands(operand)[0]
            by_hand = operation_of(operand) in _MADE_A_COLUMN
        other = saved(node, "other")
        if other is not None and hasattr(other, "shape") and len(_vector(tuple(other.shape)) or ()) == 0:
            return  # the other operand is a square of its own: a mask or a matrix of pairs
        yield from self._compare(context, graph, node, operand, result, by_hand)

    def _expanded(self, context: AuditContext, graph: LossGraph, node: Any) -> Iterable[AuditFinding]:
        inputs = operands(node)
        if len(inputs) != 1 or operation_of(inputs[0]) != "Expand" or not operands(inputs[0]):
            return
        result = shape_of(inputs[0])
        operand = operands(inputs[0])[0]
        if result is not None:
            yield from self._compare(context, graph, node, operand, result, operation_of(operand) in _MADE_A_COLUMN)

    def _compare(
        self, context: AuditContext, graph: LossGraph, node: Any, operand: Any, result: tuple[int, ...], by_hand: bool
    ) -> Iterable[AuditFinding]:
        shape = shape_of(operand)
        vector = _vector(shape) if shape is not None else None
        square = tuple(n for n in result if n != 1)
        if not vector or square != (vector[0], vector[0]) or vector[0] < 2:
            return
        yield finding(
            context, "loss_broadcast",
            f"{node.name()} made {list(result)} of a prediction of shape {list(shape or ())}: every prediction is "
            "compared with every target.",
            severity=Severity.INFO if by_hand else Severity.WARNING,
            measures=(Measure(name="num_elements", value=float(vector[0] ** 2), baseline=float(vector[0])),),
            source=graph.computed_at,
        )  # fmt: skip

    def _reduces(self, graph: LossGraph, node: Any) -> bool:
        """Whether only functions of the residual stand between the node and a mean over all its elements."""
        for _ in range(8):
            consumers = set(graph.consumers.get(node, []))
            if len(consumers) != 1:
                return False
            node = consumers.pop()
            if operation_of(node) in _MEANS:
                return shape_of(node) == ()
            if operation_of(node) not in _OF_A_RESIDUAL:
                return False
        return False


def _vector(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The one axis that is longer than 1, as a shape; empty where there are more or none."""
    long = tuple(n for n in shape if n != 1)
    return long if len(long) == 1 else ()
