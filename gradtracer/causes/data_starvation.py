"""Steps wait for data."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, loss_source, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class DataStarvation(Cause):
    """The loop waits for its data longer than it computes.

    What:
        A loader that is slower than the model.

    Why:
        The hardware idles while data are read, decoded or made.

    Definition:
        Evidence, with its log-likelihood ratio in nats: data_starvation: +6. Onset: 0, since the program is so from the
        start.

    Thresholds:
        The wait was measured; a slow thing that is not the data (logging, a checkpoint every step) looks
        alike: 6 = ln 400.

    Fixes:
        In the source.

    References:
        Mohan et al. 2021, PVLDB 14(5).
    """

    code = "data_starvation"
    title = "Steps wait for data"
    prior = 0.01

    def consider(self, series: Series) -> Case | None:
        """Weigh what was measured."""
        events = warnings_of(series, "data_starvation")
        if not events:
            return None
        return Case(
            evidence=[evidence(events[0].message, 6.0, events=events[:1])],
            onset_step=0,
            explanation="Most of the time passes between the end of a step and the first layer of the next one.",
            event_ids=event_ids(events),
            source=loss_source(series),
            advice="Raise num_workers of the DataLoader (with persistent_workers and pin_memory), decode or augment "
            "ahead of time, or move what runs between the steps out of the loop.",
        )
