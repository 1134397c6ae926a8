"""The gradient explodes."""

from __future__ import annotations

import math

from gradtracer.causes._reading import (
    event_ids,
    evidence,
    first_step,
    fix,
    last_rate,
    layer_info,
    outdone_by_the_program,
    rate_jump,
    rounded,
    source_of,
    usual_grad_norm,
    warnings_of,
    weights_are_damaged,
)
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, FixSuggestion, Measure, NonFiniteOrigin, SemanticEvent
from gradtracer.series import Series

_RECURRENT = ("RNN", "LSTM", "GRU")


@CAUSES.register
class ExplodingGradientCause(Cause):
    """The backward pass multiplies the gradient, over depth or time, until one step wrecks the weights.

    What:
        A layer, most often a recurrent one over a long sequence, whose gradient is out of proportion to its weights and
        to the loss, before the weights have moved much.

    Why:
        A single such step is enough to ruin a run; clipping is enough to prevent it.

    Definition:
        Evidence, with its log-likelihood ratio in nats: a gradient out of proportion, or one that grew a hundredfold
        and took the loss with it (exploding_gradient): +3; that came no later than the first overshooting update: +2,
        or after it: -2.5; the layer is recurrent: +1.5; numbers became non-finite right after, in the model: +0.5; the
        learning rate had jumped just before: -3; the batch held non-finite values first: -5; the program itself
        makes gradients too large (never cleared, not averaged, weights drawn too large): -4 to -6.
        Root: the layer of the first such event, of several at one step the one with the largest elasticity.

    Thresholds:
        Once a run diverges for another reason its gradients grow as well, hence only ln 20 = 3 for the symptom, and the
        order in time decides: +2 and -2.5 are ratios of about 7 and 12. Recurrence is in three quarters of these runs
        and in a sixth of others: ln 4.5 = 1.5.

    Fixes:
        clip_grad_norm at the usual norm (where none is known, at the norm at which a step moves the weights by 1 %);
        adaptive_grad_clip; a lower learning rate. From a rollback where the weights are already damaged.

    References:
        Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063. Mikolov 2012, PhD thesis, section 3.2.2 (clipping).
    """

    code = "exploding_gradient"
    title = "The gradient explodes"
    prior = 0.06

    TARGET_RATIO = 1e-2

    def consider(self, series: Series) -> Case | None:
        """Weigh gradients out of proportion, and what came first."""
        events = warnings_of(series, "exploding_gradient")
        if not events:
            return None
        began = events[0].step
        root_event = max((e for e in events if e.step == began), key=_elasticity)
        root = root_event.layer or self._largest_layer(series, began)
        found = [evidence(root_event.message, 3.0, events=[root_event])]
        overshoots = warnings_of(series, "update_ratio_too_high")
        if began <= first_step(overshoots):
            found.append(evidence("It was so before any update had overshot because of its rate.", 2.0))
        else:
            found.append(evidence("An update had overshot before the gradient grew.", -2.5, events=overshoots[:1]))
        info = layer_info(series, root)
        if info and any(word in info.type for word in _RECURRENT):
            found.append(evidence(f"{root} is recurrent ({info.type}): its gradient is a product over time.", 1.5))
        found.extend(self._around(series, began))
        found.extend(outdone_by_the_program(series, began))
        layers = tuple(dict.fromkeys(layer for layer in (root, *(e.layer for e in events)) if layer))
        return Case(
            evidence=found,
            layer=root,
            onset_step=began,
            explanation=f"{root_event.message} An update with such a gradient throws the weights away from what they "
            "had learned.",
            affected_layers=layers,
            event_ids=event_ids([*events, *warnings_of(series, "divergence", "loss_spike", "non_finite")]),
            source=source_of(series, root),
            advice="Clip the gradient norm before optimizer.step(); for a recurrent layer use an orthogonal recurrent "
            "matrix, a gated cell (LSTM, GRU) or shorter sequences.",
            fixes=self._fixes(series, began),
        )

    def _around(self, series: Series, began: int) -> list[Evidence]:
        found: list[Evidence] = []
        broken = [e for e in warnings_of(series, "non_finite") if e.step >= began]
        if broken and "data" not in broken[0].to_state:
            found.append(evidence(broken[0].message, 0.5, events=broken))
        if jump := rate_jump(series, began):
            measure = Measure(name="learning_rate", value=jump.after, baseline=jump.before)
            found.append(evidence(f"The learning rate jumped at step {jump.step}.", -3.0, measures=[measure]))
        origin = series.last_observation(NonFiniteOrigin)
        if origin and origin.where == "data" and origin.step <= began:
            found.append(evidence(f"The batch of step {origin.step} already held non-finite values.", -5.0))
        return found

    def _largest_layer(self, series: Series, step: int) -> str | None:
        norms = next((t.signal("grad_norm") for s, t in reversed(series.tables) if s <= step), {})
        finite = {n: g for n, g in norms.items() if math.isfinite(g)}
        return max(finite, key=finite.__getitem__) if finite else None

    def _fixes(self, series: Series, began: int) -> tuple[FixSuggestion, ...]:
        fixes: list[FixSuggestion] = []
        damaged = weights_are_damaged(series, began)
        norm = usual_grad_norm(series, began)
        if math.isnan(norm):
            norm = self._norm_of_a_small_step(series, began)
        if math.isfinite(norm) and norm > 0:
            fixes.append(
                fix(
                    "clip_grad_norm",
                    "No single update can throw the weights away any more; usual gradients pass as they are.",
                    rollback_first=damaged,
                    max_norm=rounded(min(norm, 1e6)),
                )
            )
        effect = "No unit's gradient is more than a hundredth of its weights."
        fixes.append(fix("adaptive_grad_clip", effect, rollback_first=damaged, clipping=0.01))
        rate = last_rate(series)
        if rate > 0:
            effect = "Every update is smaller by ten."
            fixes.append(fix("set_learning_rate", effect, rollback_first=damaged, learning_rate=rounded(rate / 10)))
        return tuple(fixes)

    def _norm_of_a_small_step(self, series: Series, step: int) -> float:
        table = next((t for s, t in reversed(series.tables) if s <= step and t.signal("update_ratio")), None)
        if table is None:
            return math.nan
        norms = [g for g in table.signal("grad_norm").values() if math.isfinite(g)]
        ratios = [u for u in table.signal("update_ratio").values() if math.isfinite(u)]
        if not norms or not ratios or max(ratios) <= 0:
            return math.nan
        return math.hypot(*norms) * min(1.0, self.TARGET_RATIO / max(ratios))


def _elasticity(event: SemanticEvent) -> float:
    return next((m.value for m in event.evidence if m.name == "elasticity" and m.value is not None), 0.0)
