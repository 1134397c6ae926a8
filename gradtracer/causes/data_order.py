"""Batches that are not mixed."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, loss_source, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class DataOrder(Cause):
    """The data come in an order, so each batch is of one kind.

    What:
        A loader without shuffling over sorted data.

    Why:
        The model follows the order instead of learning the whole.

    Definition:
        Evidence, with its log-likelihood ratio in nats: sorted_batches: +6. Onset: 0, or the first step of the event
        where batches had been mixed before it.

    Thresholds:
        The rule needs both the order and the swing of the loss that it causes: 6 = ln 400.

    Fixes:
        In the source.

    References:
        Bottou 2012, Stochastic Gradient Descent Tricks, section 4.1.
    """

    code = "data_order"
    title = "Batches are not mixed"
    prior = 0.015

    def consider(self, series: Series) -> Case | None:
        """Weigh how alike the rows of batches were."""
        events = warnings_of(series, "sorted_batches")
        if not events:
            return None
        steps, collision = series.layer("(loss)", "label_collision")
        _, pooled = series.layer("(loss)", "label_collision_pooled")
        mixed = (
            (collision <= pooled + 0.2 * (1 - pooled)) & (steps < events[0].step) if len(pooled) == len(steps) else []
        )
        before = steps[mixed] if len(steps) else []
        onset = int(before[-1]) + 1 if len(before) >= 8 else 0
        return Case(
            evidence=[evidence(events[0].message, 6.0, events=events[:1])],
            onset_step=onset,
            explanation="Each batch holds rows of one kind, so the loss of a batch collapses and jumps when the next "
            "kind comes; the model knows the last one best.",
            event_ids=event_ids([*events, *warnings_of(series, "loss_spike", "divergence")]),
            source=loss_source(series),
            advice="Shuffle: DataLoader(..., shuffle=True), a buffer for an iterable data set, or a new random "
            "permutation of the rows in every epoch.",
        )
