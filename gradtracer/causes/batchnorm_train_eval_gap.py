"""Batch normalisation that differs between training and evaluation."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, fix, in_forward_order, joined, source_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, Severity
from gradtracer.series import Series


@CAUSES.register
class BatchnormTrainEvalGap(Cause):
    """The running statistics are not those of the batches.

    What:
        A momentum that hardly moves them, or moves them all the way to each batch.

    Why:
        Training uses the batch and looks perfect; evaluation uses the running statistics and is off.

    Definition:
        Evidence, with its log-likelihood ratio in nats: running_statistics as a warning: +6, as info: +1.5; the
        momentum is outside of 0.005 to 0.5: +1. Root: the normalisation with the largest gap, the first in forward
        order among those within a tenth of it. Onset: 0 where the momentum is at fault, else the event's first step.

    Thresholds:
        The rule compares what training and evaluation compute, after the statistics have had time: 6 = ln 400.

    Fixes:
        recalibrate_batchnorm, with torch's momentum of 0.1 where the present one is odd.

    References:
        Ioffe, Szegedy 2015, arXiv:1502.03167. Wu, Johnson 2021, arXiv:2105.07576.
    """

    code = "batchnorm_train_eval_gap"
    title = "Batch normalisation differs between training and evaluation"
    prior = 0.015

    def consider(self, series: Series) -> Case | None:
        """Weigh how far the running statistics are from the batches."""
        events = series.events_of("running_statistics")
        if not events:
            return None
        sure = [e for e in events if e.severity is not Severity.INFO] or events

        def gap(layer: str) -> float:
            _, values = series.layer(layer, "running_mean_gap")
            _, widths = series.layer(layer, "running_var_gap")
            return float(max(values[-1], widths[-1])) if len(values) and len(widths) else 0.0

        layers = in_forward_order(series, (e.layer for e in sure if e.layer))
        largest = max((gap(layer) for layer in layers), default=0.0)
        root = next((layer for layer in layers if gap(layer) >= 0.9 * largest), None)
        event = next((e for e in sure if e.layer == root), sure[0])
        found: list[Evidence] = [
            evidence(event.message, 1.5 if event.severity is Severity.INFO else 6.0, events=[event])
        ]
        momentum = next((m.value for m in event.evidence if m.name == "norm_momentum"), None)
        odd = momentum is not None and momentum >= 0 and not 0.005 <= momentum < 0.5
        if odd:
            found.append(evidence(f"The momentum of {root} is {momentum:.3g}; torch's default is 0.1.", 1.0))
        return Case(
            evidence=found,
            layer=root,
            onset_step=0 if odd else event.step,
            explanation=f"{event.message} Evaluation will normalise by the running statistics.",
            affected_layers=tuple(layers),
            event_ids=event_ids(events),
            source=source_of(series, root),
            advice=f"Build {root} with momentum=0.1 (in torch the share of the new batch: 1 minus the momentum of "
            "other frameworks), then recalibrate: some hundred batches in training mode without updates.",
            fixes=(
                fix(
                    "recalibrate_batchnorm",
                    "Evaluation normalises by what the batches have.",
                    layers=joined(layers),
                    momentum=0.1 if odd else None,
                ),
            ),
        )
