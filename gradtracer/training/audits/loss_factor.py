"""Constants that the whole loss is multiplied by."""

from __future__ import annotations

from collections.abc import Iterable

from gradtracer.records import AuditFinding, Measure, Severity
from gradtracer.training.audits._loss_expression import loss_end
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph


@AUDITS.register
class LossFactor(Audit):
    """Reads from the end of the loss's graph by what the loss is multiplied or divided, and how it was reduced.

    What:
        A mean that is divided once more, a sum over the batch, a constant factor far from 1.

    Why:
        Every gradient changes by that factor, and with it every update of an optimizer without moments.

    Definition:
        f, the product of the constants at the end of the loss, without that of a GradScaler and of accumulation;
        n, the number of terms that were reduced. No units.
        loss_divided (`info`): f <= 1/16. loss_multiplied (`info`): f >= 16, or a sum over at least 16 terms and
        f n >= 16.

    Thresholds:
        16: beyond what weighting a loss needs, and below most batch sizes. By itself the factor is no fault, since a
        rate may fit it; the rule loss_scale looks at what it did.

    Fixes:
        set_learning_rate by the same factor as a stopgap; in the source: reduce the loss once.

    References:
        PyTorch documentation, torch.nn.CrossEntropyLoss, `reduction`.
    """

    code = "loss_factor"
    reads_parts = True

    FAR = 16.0

    def __init__(self) -> None:
        self._told: set[str] = set()

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        """Read the end of the loss."""
        end = loss_end(graph)
        size = abs(end.factor) * (end.num_terms if end.reduction == "sum" and end.num_terms else 1)
        if abs(end.factor) <= 1 / self.FAR and size <= 1 / self.FAR:
            code = "loss_divided"
            twice = end.reduction == "mean" and end.num_terms and abs(end.num_terms * abs(end.factor) - 1) < 1e-3
            what = f"The loss is a {end.reduction or 'value'} over {end.num_terms or 'some'} terms"
            detail = f"{what}, divided by {1 / abs(end.factor):.4g}" + (" once more." if twice else ".")
        elif size >= self.FAR:
            code = "loss_multiplied"
            twice = False
            detail = f"The loss is multiplied by {abs(end.factor):.4g}" + (
                f" and is a sum over {end.num_terms} terms." if end.reduction == "sum" else "."
            )
        else:
            return
        if code in self._told:
            return
        self._told.add(code)
        yield finding(
            context,
            code,
            detail,
            severity=Severity.INFO,
            measures=[
                Measure(name="factor", value=size),
                Measure(name="num_terms", value=float(end.num_terms)),
                Measure(name="reduced_twice", value=float(bool(twice))),
            ],
            source=graph.scaled_at,
        )
