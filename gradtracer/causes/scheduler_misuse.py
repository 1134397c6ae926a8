"""The schedule is stepped at the wrong place or rate."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, fix, optimizer_source, rounded, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import OptimizerDescription
from gradtracer.series import Series


@CAUSES.register
class SchedulerMisuse(Cause):
    """The learning rate is gone long before the run is over, or never comes up.

    What:
        Schedules counted in epochs that are stepped at every batch, schedules that end while training goes on, warm-ups
        that stand still.

    Why:
        The rate may be right on paper; the steps that are left change nothing.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the rate ran out or never started (rate_schedule): +7; a
        scheduler is attached to the optimizer: +1.
        Onset: the last step with the full rate, or step 0.

    Thresholds:
        Nobody trains a quarter of a run at a hundredth of the rate, with a loss that was falling, on purpose:
        ln 1000 = 7.

    Fixes:
        set_learning_rate to the rate before the fall, or the one that the schedule was built for; to a third of it;
        cosine_restart from it.

    References:
        PyTorch documentation, torch.optim, "How to adjust learning rate".
    """

    code = "scheduler_misuse"
    title = "The schedule takes the learning rate away"
    prior = 0.02

    def consider(self, series: Series) -> Case | None:
        """Weigh what the schedule did to the rate."""
        events = warnings_of(series, "rate_schedule")
        if not events:
            return None
        event = events[0]
        found = [evidence(event.message, 7.0, events=events)]
        optimizer = series.last_observation(OptimizerDescription)
        groups = optimizer.groups if optimizer else ()
        if any(p.name == "initial_lr" for group in groups for p in group.hyperparameters):
            found.append(evidence("A scheduler is attached to the optimizer.", 1.0))
        before = next((m.baseline for m in event.evidence if m.name == "learning_rate"), None)
        fixes = ()
        if before:
            effect = "Updates are as large again as the run was set up for."
            restart = "The rate is as large again, and then falls to 0 over as many steps as the run has made."
            fixes = (
                fix("set_learning_rate", effect, learning_rate=rounded(before)),
                fix("set_learning_rate", effect, learning_rate=rounded(before / 3)),
                fix("cosine_restart", restart, learning_rate=rounded(before), steps=max(series.last_step, 2)),
            )
        stuck = event.to_state == "not_started"
        return Case(
            evidence=found,
            onset_step=event.step,
            explanation=event.message,
            event_ids=event_ids([*events, *warnings_of(series, "update_ratio_too_low")]),
            source=optimizer_source(series),
            advice="Call scheduler.step() at every batch if the warm-up is counted in batches."
            if stuck
            else "Call scheduler.step() once an epoch and not at every batch, or build the schedule for the number of "
            "batches (T_max, total_steps, step_size).",
            fixes=fixes,
        )
