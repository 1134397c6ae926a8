"""The learning rate is not warmed up."""

from __future__ import annotations

from gradtracer.causes._reading import (
    event_ids,
    evidence,
    fix,
    hyperparameter,
    last_rate,
    optimizer_source,
    rounded,
    warnings_of,
)
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, FixSuggestion, OptimizerDescription
from gradtracer.series import Series


@CAUSES.register
class WarmupMissing(Cause):
    """The full rate from step 0 throws a deep or attention model off before the optimizer's moments have settled.

    What:
        An early spike or jump of the loss and a plateau after it, in a model that trains at the same rate once that is
        raised slowly.

    Why:
        Where the first updates land is where the run stays; lowering the rate later does not bring it back.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the first updates of an adaptive optimizer moved all layers far
        and the loss has not fallen since (unsettled_start): +5.5, of their norm by 0.3 or more: -3 (then the rate is
        too high at any time); or, in an attention model under Adam at full rate from step 0, updates overshot or the
        loss jumped in the first 50 steps and never again: +3.5; the gradient vanished within the
        first 10 steps: -2 (later it is what became of it).
        Onset: step 0.

    Thresholds:
        A stall from the first step has other causes, which do not move the weights so far: ln 250 = 5.5. Overshooting
        that ends by itself while the rate stays is a start that went wrong: ln 30 = 3.5.

    Fixes:
        From a rollback: warmup over a tenth of the 2 / (1 - beta2) updates that Adam is said to need, at least 100 (a
        run may not be longer), or over all of them; set_learning_rate to a tenth.

    References:
        Liu et al. 2020, arXiv:1908.03265. Xiong et al. 2020, arXiv:2002.04745. Goyal et al. 2017, arXiv:1706.02677.
    """

    code = "warmup_missing"
    title = "The learning rate is not warmed up"
    prior = 0.02

    EARLY = 50
    FIRST_STEPS = 10
    TOO_FAR = 0.3

    def consider(self, series: Series) -> Case | None:
        """Weigh the first steps."""
        thrown = warnings_of(series, "unsettled_start")
        found: list[Evidence] = []
        events = thrown
        if thrown:
            found.append(evidence(thrown[0].message, 5.5, events=thrown))
            ratio = next((m.value for m in thrown[0].evidence if m.name == "update_ratio" and m.value), 0.0)
            if ratio >= self.TOO_FAR:
                found.append(evidence("The updates are larger than a warm-up would mend.", -3.0))
        elif self._could(series):
            events = warnings_of(series, "update_ratio_too_high", "loss_spike", "divergence")
            if not events or max(e.last_step for e in events) > self.EARLY or series.last_step < 3 * self.EARLY:
                return None
            statement = (
                f"{events[0].message} It was so in the first {self.EARLY} steps only, at the rate of all others."
            )
            found.append(evidence(statement, 3.5, events=events))
        else:
            return None
        faded = warnings_of(series, "vanishing_gradient")
        if faded and faded[0].step < self.FIRST_STEPS:
            found.append(evidence(faded[0].message, -2.0, events=faded))
        rate = last_rate(series)
        fixes = self._fixes(series, rate)
        return Case(
            evidence=found,
            onset_step=0,
            explanation=f"{events[0].message} The rate was {rate:.3g} from the first step on; the second moments "
            "of the optimizer rested on a few batches then.",
            event_ids=event_ids(events),
            source=optimizer_source(series),
            advice="Raise the learning rate from 0 over the first hundreds of steps (a LambdaLR stepped at every "
            "batch), or put the normalisation before attention and feed-forward (norm_first=True).",
            fixes=fixes,
        )

    def _fixes(self, series: Series, rate: float) -> tuple[FixSuggestion, ...]:
        beta2 = hyperparameter(series, "beta2")
        full = round(2 / (1 - min(beta2, 0.9999))) if beta2 is not None else 2000
        effect = "The first updates are small until the moments have settled."
        fixes = [
            fix("warmup", effect, rollback_first=True, steps=steps)
            for steps in sorted({max(100, full // 10), max(100, full)})
        ]
        if rate > 0:
            effect = "Every update is smaller by ten."
            fixes.append(fix("set_learning_rate", effect, rollback_first=True, learning_rate=rounded(rate / 10)))
        return tuple(fixes)

    def _could(self, series: Series) -> bool:
        """Whether the model attends, the optimizer has moments, and the rate did not begin low."""
        model, optimizer = series.model, series.last_observation(OptimizerDescription)
        rates = series.run("learning_rate")[:20]
        if model is None or optimizer is None or "Adam" not in optimizer.type or not len(rates):
            return False
        attends = any("Attention" in i.type or "attn" in i.name.lower() for i in model.layers)
        return attends and bool(rates[0] >= 0.5 * rates.max())
