"""One label only."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, loss_source, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class ConstantLabels(Cause):
    """Every label is the same class.

    What:
        A label column that is constant, a lookup that returns its default, a data set of which one folder was read.

    Why:
        The loss falls to 0 and looks like success.

    Definition:
        Evidence, with its log-likelihood ratio in nats: constant_labels: +7; other labels came later: -6. Onset: the
        first step of the constant stretch.

    Thresholds:
        The labels were seen: 7 = ln 1100. Sorted data begin with a stretch of one class too; what comes later tells
        them.

    Fixes:
        In the data.

    References:
        Hanley, Lippman-Hand 1983, JAMA 249.
    """

    code = "constant_labels"
    title = "All labels are the same"
    prior = 0.01

    def consider(self, series: Series) -> Case | None:
        """Weigh the labels that came."""
        events = warnings_of(series, "constant_labels")
        if not events:
            return None
        found = [evidence(events[0].message, 7.0, events=events[:1])]
        steps, collision = series.layer("(loss)", "label_collision")
        later = steps[(steps > events[0].last_step) & (collision < 1.0)]
        if len(later):
            found.append(evidence(f"Other labels came at step {later[0]}.", -6.0))
        mixed = steps[(steps < events[0].step) & (collision < 1.0)]
        onset = int(mixed[-1]) + 1 if len(mixed) else 0
        return Case(
            evidence=found,
            onset_step=onset,
            explanation=f"{events[0].message} A model that ignores its input solves such a task.",
            event_ids=event_ids(events),
            source=loss_source(series),
            advice="Look at where the labels are read: a constant column, a failed lookup, or a filter that left one "
            "class. Count the labels of the whole data set before training.",
        )
