"""Representations fall to one point."""

from __future__ import annotations

import numpy as np

from gradtracer.causes._reading import (
    event_ids,
    evidence,
    fix,
    in_forward_order,
    last_rate,
    rounded,
    source_of,
    warnings_of,
)
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, Measure
from gradtracer.series import Series


@CAUSES.register
class EmbeddingCollapse(Cause):
    """An encoder maps all inputs to one point, which its loss does not mind enough.

    What:
        Hardest-negative triplets, a self-supervised loss without negatives or stop-gradient, a pull without a push, or
        steps too large for a metric loss.

    Why:
        The loss sits at its margin or at its least; the representation is useless, and the gradient is gone.

    Definition:
        Evidence, with its log-likelihood ratio in nats: rows that the loss compares became one (embedding_collapse):
        +6; the loss has stood still since, within 1 %: +1; rectifiers died: -2; numbers are not finite: -2.
        Root: the layer that faces the loss. Onset: the first sample of the collapse.

    Thresholds:
        Those of the detector. Of other faults dead units and a diverged run also make outputs constant, and they are
        reported by themselves: ln 400 = 6.

    Fixes:
        normalize_outputs, with layers drawn anew; set_learning_rate, from before the collapse. The loss must change in
        the source if it comes back.

    References:
        Hermans, Beyer, Leibe 2017, arXiv:1703.07737. Chen & He 2021, arXiv:2011.10566.
    """

    code = "embedding_collapse"
    title = "Representations collapse to one point"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh rows that became one."""
        events = warnings_of(series, "embedding_collapse")
        if not events:
            return None
        first = min(events, key=_began)
        began = _began(first)
        found: list[Evidence] = [evidence(first.message, 6.0, events=[first])]
        steps, losses = series.steps, series.run("loss")
        since = losses[steps >= began]
        if len(since) >= 20 and np.isfinite(since).all():
            tail = since[len(since) // 2 :]
            middle = float(np.median(tail))
            width = float(np.subtract(*np.percentile(tail, [90, 10])))
            if abs(width) <= 0.01 * abs(middle):
                measure = Measure(name="loss", value=middle)
                found.append(evidence(f"The loss stands still at {middle:.4g}.", 1.0, measures=[measure]))
        if dead := [e for e in warnings_of(series, "dead_units") if e.step <= began]:
            found.append(evidence(dead[0].message, -2.0, events=dead))
        if bad := [e for e in warnings_of(series, "non_finite") if e.step <= began]:
            found.append(evidence(bad[0].message, -2.0, events=bad))
        rate = last_rate(series)
        fixes = [
            fix(
                "set_learning_rate",
                f"Smaller steps, from rows as far apart as before step {began}, do not jump into the point.",
                rollback_first=True,
                learning_rate=rounded(rate / factor),
            )
            for factor in (10, 30)
            if rate > 0
        ]
        if first.layer:
            effect = "Rows begin apart, and at unit length they cannot shrink to one point."
            fixes.insert(0, fix("normalize_outputs", effect, layer=first.layer, reinitialize=True))
        return Case(
            evidence=found,
            layer=first.layer,
            onset_step=began,
            explanation=f"{first.message} The loss compares rows, and all rows being one is a place where it can rest.",
            affected_layers=tuple(in_forward_order(series, (e.layer for e in events if e.layer))),
            event_ids=event_ids(events),
            source=source_of(series, first.layer),
            advice="Normalise the embedding to unit length before distances are taken, take semi-hard or all negatives "
            "in place of the hardest while training begins, and lower the learning rate; for a loss without negatives, "
            "keep the stop-gradient and the predictor, or add a variance term.",
            fixes=tuple(fixes),
        )


def _began(event: object) -> int:
    measures = getattr(event, "evidence", ())
    found = next((m.value for m in measures if m.name == "first_step" and m.value is not None), None)
    return int(found) if found is not None else int(getattr(event, "step", 0))
