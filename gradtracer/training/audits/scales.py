"""The scale of inputs and targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from gradtracer.records import AuditFinding
from gradtracer.training.audits.base import AUDITS, INPUT, LOSS, Audit, AuditContext
from gradtracer.training.graph import LossGraph
from gradtracer.training.targets import loss_terms

_MAX_VALUES = 1_000_000


@AUDITS.register
class Scales(Audit):
    """How large the numbers are that the model is given and asked for.

    What:
        Root mean square of the model's floating-point input, its spread over the columns of a table, and the root mean
        square of regression targets.

    Why:
        The gradient of the first layer grows with its input, and the largest rate that is stable falls with the square
        of it.

    Definition:
        ``input_rms = sqrt(mean x^2)`` over the first floating-point tensor that the model (or, if it is not called
        itself, its first layer) is given; ``input_column_spread`` is the largest column's over the median column's;
        ``target_rms`` likewise for the targets of squared and absolute losses.

    Thresholds:
        None here.

    Fixes:
        None; see the cause.

    References:
        LeCun, Bottou, Orr, Mueller 1998, Efficient BackProp, section 4.3.
    """

    code = "scales"

    def __init__(self) -> None:
        self._seen = False

    def on_forward(
        self, context: AuditContext, name: str, module: nn.Module, inputs: Sequence[Any], output: Any
    ) -> Iterable[AuditFinding]:
        """Measure the input; the model's own call comes last in a step and counts."""
        x = next((t for t in inputs if isinstance(t, Tensor) and t.is_floating_point() and t.numel()), None)
        if x is None or (self._seen and module is not context.model):
            return ()
        self._seen = True
        if x.numel() > _MAX_VALUES:
            x = x[:: -(-x.numel() // _MAX_VALUES)]
        squares = x.detach().double().square()
        context.record(INPUT, "input_rms", squares.mean().sqrt())
        if x.dim() == 2:
            columns = squares.mean(0).sqrt()
            context.record(INPUT, "input_column_spread", columns.max() / columns.median().clamp_min(1e-12))
        return ()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Measure the targets."""
        if not context.sampled:
            return ()
        for term in loss_terms(graph):
            if term.kind == "values":
                context.record(LOSS, "target_rms", term.target.double().square().mean().sqrt())
        return ()

    def on_step_end(self, context: AuditContext) -> Iterable[AuditFinding]:
        """Begin anew."""
        self._seen = False
        return ()
