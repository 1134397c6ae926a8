"""The loss has the wrong scale."""

from __future__ import annotations

import math

from gradtracer.causes._reading import (
    USUAL_RATE,
    event_ids,
    evidence,
    fix,
    ignores_scale,
    last_rate,
    rounded,
    warnings_of,
    weights_are_damaged,
)
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import AuditFinding, Evidence, FixSuggestion, OptimizerDescription
from gradtracer.series import Series


@CAUSES.register
class LossScale(Cause):
    """The loss is divided or multiplied so that all gradients are off by one common factor.

    What:
        A mean that is divided by the batch size once more, a sum where a mean is meant, a stray constant.

    Why:
        The learning rate is then wrong by that factor: the run stands still, or diverges.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the loss is divided by a constant, the optimizer feels it and
        the loss stands still (loss_off_scale): +6; the constant is the number of terms of the mean: +2; or the loss is
        multiplied or summed (loss_multiplied), the optimizer feels it, and updates overshot or the loss diverged: +5,
        by a factor of at least 100: +1, and the rate itself is at most 0.1: +1; the rate had jumped: -4.
        Root: the first layer. Onset: step 0.

    Thresholds:
        The constant stands in the graph, and the harm is seen: ln 400 = 6. A loss that is multiplied competes with a
        rate that is too high, which is the same product: ln 150 = 5, less where the rate is large by itself.

    Fixes:
        scale_gradients or set_learning_rate by the same factor; from a rollback where the weights are already damaged.

    References:
        PyTorch documentation, torch.nn.CrossEntropyLoss, `reduction`. Goyal et al. 2017, arXiv:1706.02677.
    """

    code = "loss_scale"
    title = "The loss has the wrong scale"
    prior = 0.02

    def consider(self, series: Series) -> Case | None:
        """Weigh constants in the loss, and what they did."""
        optimizer = series.last_observation(OptimizerDescription)
        if optimizer is not None and ignores_scale(optimizer.type):
            return None
        stalled = warnings_of(series, "loss_off_scale")
        divided, multiplied = series.audit("loss_divided"), series.audit("loss_multiplied")
        if stalled and divided:
            fact = divided[0]
            events = stalled
            found = [evidence(stalled[0].message, 6.0, events=stalled)]
            if _measure(fact, "reduced_twice"):
                found.append(evidence("The constant is the number of terms that the mean was taken over.", 2.0))
        elif multiplied:
            fact = multiplied[0]
            events = warnings_of(series, "update_ratio_too_high", "divergence", "exploding_gradient", "non_finite")
            if not events or series.audit("weights_too_large", "gradients_never_cleared"):
                return None
            found = self._overshooting(series, fact)
        else:
            return None
        layer = next((i.name for i in series.model.layers if i.num_parameters), None) if series.model else None
        return Case(
            evidence=found,
            layer=layer,
            onset_step=fact.step,
            explanation=f"{fact.detail} Every gradient changes by that factor.",
            event_ids=event_ids(events),
            source=fact.source,
            advice="Reduce the loss once: use the mean over the batch and no further constant, or divide the learning "
            "rate by the factor.",
            fixes=self._fixes(series, fact),
        )

    def _overshooting(self, series: Series, fact: AuditFinding) -> list[Evidence]:
        found = [evidence(f"{fact.detail} Updates overshoot.", 5.0, measures=fact.measures)]
        if _measure(fact, "factor") >= 100:
            found.append(evidence("The factor is at least 100.", 1.0))
        rates = series.run("learning_rate")
        rates = rates[~(rates != rates)]
        if len(rates):
            usual = bool(rates[0] <= USUAL_RATE)
            found.append(evidence(f"The learning rate is {rates[0]:.3g}.", 1.0 if usual else -3.0))
            if rates.max() >= 5 * rates[0]:
                found.append(evidence("The learning rate rose in the run.", -4.0))
        return found

    def _fixes(self, series: Series, fact: AuditFinding) -> tuple[FixSuggestion, ...]:
        rate, factor = last_rate(series), _measure(fact, "factor")
        if not (rate > 0 and factor > 0 and math.isfinite(rate / factor)):
            return ()
        effect, damaged = "Updates are as large as with a mean.", weights_are_damaged(series, fact.step)
        return (
            fix("scale_gradients", effect, rollback_first=damaged, factor=rounded(1 / factor)),
            fix("set_learning_rate", effect, rollback_first=damaged, learning_rate=rounded(rate / factor)),
        )


def _measure(fact: AuditFinding, name: str) -> float:
    return next((m.value for m in fact.measures if m.name == name and m.value is not None), 0.0)
