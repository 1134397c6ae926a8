"""One class drowns the rest."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, fix, loss_source, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series


@CAUSES.register
class ClassImbalance(Cause):
    """The labels are mostly of one class, and so are all answers.

    What:
        An unweighted loss over rare positives.

    Why:
        To answer with the majority is nearly optimal for such a loss, and useless.

    Definition:
        Evidence, with its log-likelihood ratio in nats: majority_only: +5. Onset: 0, since the labels are so from the
        start.

    Thresholds:
        5 = ln 150: some such models are read as probabilities, and then nothing is wrong.

    Fixes:
        weigh_classes; in the source the weights of the loss.

    References:
        He, Garcia 2009, IEEE TKDE 21. King, Zeng 2001, Political Analysis 9.
    """

    code = "class_imbalance"
    title = "One class drowns the rest"
    prior = 0.015

    def consider(self, series: Series) -> Case | None:
        """Weigh labels and answers."""
        events = warnings_of(series, "majority_only")
        if not events:
            return None
        return Case(
            evidence=[evidence(events[0].message, 5.0, events=events[:1])],
            onset_step=0,
            explanation=f"{events[0].message} The loss is small because the rare rows are few.",
            event_ids=event_ids(events),
            source=loss_source(series),
            advice="Weigh the classes (pos_weight = negatives / positives, or weight=), sample them evenly, or put the "
            "decision threshold at the prior. If only the ranking or the probability is used, nothing needs to change.",
            fixes=(fix("weigh_classes", "Rare classes have the say of the frequent one, and are found."),),
        )
