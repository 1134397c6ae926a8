"""The learning rate is too low."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, fix, last_rate, optimizer_source, rounded, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Measure
from gradtracer.series import Series


@CAUSES.register
class LearningRateTooLow(Cause):
    """Steps are so small that the run would have to go on for orders of magnitude longer.

    What:
        A learning rate at which no layer moves noticeably, although gradients arrive and the loss is far from flat.

    Why:
        Nothing fails, so nobody looks; the run ends where it began.

    Definition:
        Evidence, with its log-likelihood ratio in nats: no layer moved and the loss is where it began
        (update_ratio_too_low): +5; layers differ little in their ratio, so it is the rate and no single layer: +1; the
        gradient fades toward the input (vanishing_gradient): -4.
        Onset: step 0.

    Thresholds:
        The rule demands that every sampled update of the run was below 1e-5, which no other cause produces but a
        gradient that does not arrive: ln 150 = 5.

    Fixes:
        set_learning_rate so that the largest update ratio comes to 1e-2, where small networks begin, or to 1e-3, where
        large ones train; by at most a factor of 1e5.

    References:
        Karpathy, CS231n notes, "Ratio of weights:updates". Smith 2017, arXiv:1506.01186 (finding a rate).
    """

    code = "learning_rate_too_low"
    title = "The learning rate is too low"
    prior = 0.05

    TARGET_RATIO = 1e-2
    LARGEST_FACTOR = 1e5
    LARGEST_RATE = 1.0

    def consider(self, series: Series) -> Case | None:
        """Weigh updates that never moved anything."""
        events = warnings_of(series, "update_ratio_too_low")
        if not events:
            return None
        ratio = next((m.value for m in events[0].evidence if m.name == "update_ratio"), None) or 0.0
        rate = last_rate(series)
        found = [evidence(events[0].message, 5.0, events=events)]
        table = series.table_at()
        ratios = [u for u in table[1].signal("update_ratio").values() if u > 0] if table else []
        if len(ratios) > 1:
            even = max(ratios) <= 1e3 * min(ratios)
            statement = "All layers move about equally little." if even else "Some layers move far less than others."
            measures = [Measure(name="smallest_over_largest_update_ratio", value=min(ratios) / max(ratios))]
            found.append(evidence(statement, 1.0 if even else -1.0, measures=measures))
        if faded := warnings_of(series, "vanishing_gradient"):
            found.append(evidence(faded[0].message, -4.0, events=faded))
        fixes = ()
        if rate > 0 and ratio > 0:
            factor = min(self.TARGET_RATIO / ratio, self.LARGEST_FACTOR)
            rates = [rounded(min(rate * f, max(self.LARGEST_RATE, rate))) for f in (factor, factor / 10) if f > 1]
            effect = "The largest update ratio comes to about {:.0e}, and the loss begins to fall."
            fixes = tuple(
                fix("set_learning_rate", effect.format(ratio * new / rate), learning_rate=new)
                for new in dict.fromkeys(rates)
            )
        return Case(
            evidence=found,
            onset_step=0,
            explanation=f"At a learning rate of {rate:.3g} one step moves no layer by more than {ratio:.1g} of its "
            "norm. At this pace the run cannot learn in the steps it has.",
            event_ids=event_ids(events),
            fixes=fixes,
            source=optimizer_source(series),
            advice="Raise the learning rate where the optimizer is built; check the schedule, and whether the loss is "
            "divided twice.",
        )
