"""The learning rate is too high."""

from __future__ import annotations

import math

from gradtracer.causes._reading import (
    event_ids,
    evidence,
    first_step,
    fix,
    ignores_scale,
    last_rate,
    optimizer_source,
    outdone_by_the_program,
    rate_at,
    rate_jump,
    rounded,
    warnings_of,
    weights_are_damaged,
)
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, FixSuggestion, Measure, NonFiniteOrigin, OptimizerDescription, SemanticEvent
from gradtracer.series import Series


@CAUSES.register
class LearningRateTooHigh(Cause):
    """Steps overshoot: the optimizer moves the weights farther than the gradient can vouch for.

    What:
        A learning rate at which the loss oscillates or diverges, from the start or from a change of the rate on.

    Why:
        It is the most common reason for a run that diverges, and the cheapest to mend while it still trains.

    Definition:
        Evidence, with its log-likelihood ratio in nats:
        an update overshot (update_ratio_too_high): +3; before any other symptom: +1; the loss diverged: +1.5; it rose
        and stayed up (loss_spike): +1; the first updates threw the model off
        (unsettled_start): +2; the rate rose fivefold beyond all it had been, within 10 steps before: +3; the
        gradient was in proportion to weights and loss then: +1, or it was not (exploding_gradient came first): -3; the
        batch held non-finite values first: -6; the rate has gone back since: -5; the program
        itself makes steps too large (gradients never cleared or not averaged, weights drawn too large, a loss
        multiplied by a large factor at a usual rate): -4 to -6.
        Onset: the step of the jump of the rate, else that of the first symptom.

    Thresholds:
        An overshoot is seen in nearly all runs of this cause and, as a by-product, in about one in twenty of the
        others: ln 20 = 3. A fivefold jump hardly ever just happens to precede a divergence: ln 20. A gradient that
        exploded first explains the same symptoms without the rate: -ln 20. The small ones are by-products that other
        causes have half as often or less: ln 2 to ln 4. A rate that is no longer in force may have done the damage, but
        what fails now, and what has to be mended, is something else: -5.

    Fixes:
        set_learning_rate, from a rollback where the weights are already damaged: to the value before the jump, a third
        or a tenth of it. Without a jump, to at most a tenth of what it is: for plain gradients to rate / P, P being the
        relative change of the loss that first order allowed, so that eta lambda = P / 2 comes to 1/2, a quarter of what
        is stable; otherwise, and as a second choice, so that the update ratio comes to 1e-2, or ten times less or more.

    References:
        Lewkowycz et al. 2020, arXiv:2003.02218. Goodfellow, Bengio, Courville 2016, Deep Learning, section 11.4.1.
    """

    code = "learning_rate_too_high"
    title = "The learning rate is too high"
    prior = 0.2

    TARGET_RATIO = 1e-2

    def consider(self, series: Series) -> Case | None:
        """Weigh overshooting updates and what they did to the loss."""
        overshoots = warnings_of(series, "update_ratio_too_high")
        diverged = warnings_of(series, "divergence")
        shifted = warnings_of(series, "loss_spike")
        thrown = warnings_of(series, "unsettled_start")
        symptoms = [*overshoots, *diverged, *shifted, *thrown]
        if not symptoms:
            return None
        began = first_step(symptoms)
        jump = rate_jump(series, began)
        onset = jump.step if jump else int(began)
        found: list[Evidence] = []
        if overshoots:
            found.append(evidence(overshoots[0].message, 3.0, events=overshoots))
            if overshoots[0].step <= first_step(warnings_of(series)):
                found.append(evidence("No other symptom came before the overshooting update.", 1.0))
        elif not thrown:
            found.append(evidence("No sampled update overshot.", -1.0))
        if thrown:
            found.append(evidence(thrown[0].message, 2.0, events=thrown))
        if diverged:
            found.append(evidence(diverged[0].message, 1.5, events=diverged))
        if shifted:
            found.append(evidence(shifted[0].message, 1.0, events=shifted))
        if jump:
            found.append(
                evidence(
                    f"The learning rate rose from {jump.before:.3g} to {jump.after:.3g} at step {jump.step}.",
                    3.0,
                    measures=[Measure(name="learning_rate", value=jump.after, baseline=jump.before)],
                )
            )
        found.extend(self._against(series, overshoots, began, onset))
        found.extend(outdone_by_the_program(series, began))
        now = last_rate(series)
        return Case(
            evidence=found,
            onset_step=onset,
            explanation=self._explanation(jump is not None, overshoots, onset, rate_at(series, onset)),
            event_ids=event_ids([*symptoms, *warnings_of(series, "non_finite")]),
            fixes=self._fixes(series, jump.before if jump else None, overshoots, onset, now),
            source=optimizer_source(series),
            advice="Lower the learning rate where the optimizer or its schedule is built"
            + (f"; look at what the schedule does at step {jump.step}." if jump else ", or warm it up."),
        )

    def _against(self, series: Series, overshoots: list[SemanticEvent], began: float, onset: int) -> list[Evidence]:
        found: list[Evidence] = []
        exploded = warnings_of(series, "exploding_gradient")
        if exploded and exploded[0].step <= began:
            found.append(evidence("The gradient was out of proportion no later than that.", -3.0, events=exploded[:1]))
        elif overshoots:
            found.append(evidence("When it overshot, the gradient was in proportion to weights and loss.", 1.0))
        origin = series.last_observation(NonFiniteOrigin)
        if origin and origin.where == "data" and origin.step <= began:
            found.append(evidence(f"The batch of step {origin.step} already held non-finite values.", -6.0))
        before, now = rate_at(series, onset), last_rate(series)
        if now <= 0.2 * before:
            found.append(
                evidence(
                    f"The rate has gone back to {now:.3g} since, so it is not what fails now.",
                    -5.0,
                    measures=[Measure(name="learning_rate", value=now, baseline=before)],
                )
            )
        return found

    def _explanation(self, jumped: bool, overshoots: list[SemanticEvent], onset: int, rate: float) -> str:
        start = (
            f"The learning rate jumped at step {onset}. " if jumped else f"From step {onset} on a rate of {rate:.3g} "
            "moved the weights too far. "
        )  # fmt: skip
        return start + (overshoots[0].message if overshoots else "The loss left the scale on which it had been.")

    def _fixes(
        self, series: Series, before: float | None, overshoots: list[SemanticEvent], onset: int, now: float
    ) -> tuple[FixSuggestion, ...]:
        if not now > 0:
            return ()
        rate = rate_at(series, onset)
        ratio = _measure(overshoots, "update_ratio") or 0.1
        by_ratio = rate * min(0.1, self.TARGET_RATIO / ratio)
        optimizer = series.last_observation(OptimizerDescription)
        change = _measure(overshoots, "predicted_relative_loss_change")
        if before is not None:
            rates = [before, before / 3, before / 10]
        elif change and optimizer is not None and not ignores_scale(optimizer.type):
            rates = [rate * min(0.1, 1 / change), by_ratio]
        else:
            rates = [by_ratio, by_ratio / 10, by_ratio * 10]
        rates = [r for r in rates if math.isfinite(r) and r <= now / 2] or [now / 10]
        damaged = weights_are_damaged(series, onset)
        return tuple(
            fix(
                "set_learning_rate",
                "Updates come down to a size at which the loss falls again.",
                rollback_first=damaged,
                learning_rate=rounded(r),
            )
            for r in rates
        )


def _measure(events: list[SemanticEvent], name: str) -> float | None:
    return next((m.value for e in events for m in e.evidence if m.name == name and m.value), None)
