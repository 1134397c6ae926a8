"""Rectifiers died."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.causes._reading import (
    event_ids,
    evidence,
    fix,
    in_forward_order,
    joined,
    last_rate,
    rate_at,
    rate_jump,
    rounded,
    source_of,
    warnings_of,
)
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, FixSuggestion, NonFiniteOrigin
from gradtracer.series import Series


@CAUSES.register
class DeadRelu(Cause):
    """Units of a rectified layer are negative for every input, so they output 0 and receive no gradient.

    What:
        Layers that lost all or most of their units, by one update that was too large, by a bias far below zero, or by
        weights that came damaged from somewhere.

    Why:
        Dead units do not come back by training: their gradient is zero. A layer that is dead as a whole also cuts off
        everything before it.

    Definition:
        Evidence, with its log-likelihood ratio in nats: units died (dead_units): +4; the gradient of the layer is
        exactly zero: +1; an overshooting update came within 20 steps before and the rate has gone back since: +3, or it
        has not: -3 (then the rate is the cause and this its consequence); numbers are not finite: -2.
        Root: of the layers that died within 10 steps of the first the one nearest to the input: those behind it are fed
        constants by it. Onset: the jump of the rate that did it, else the first event.

    Thresholds:
        The rule needs most units of a layer to die at once, or all of them; of the other causes only a learning rate
        that is too high does that, and for that the overshoot speaks: ln 50 = 4.

    Fixes:
        revive_dead_units; reinitialize_layer; set_learning_rate to what it was before the injury, from a snapshot of
        before; leaky_slope.

    References:
        Maas, Hannun, Ng 2013, ICML workshop. Lu, Shin, Su, Karniadakis 2019, arXiv:1903.06733.
    """

    code = "dead_relu"
    title = "Rectifier units died"
    prior = 0.06

    SAME_UPSET = 10
    AFTERMATH = 20

    def consider(self, series: Series) -> Case | None:
        """Weigh layers whose units died, and what came before."""
        events = warnings_of(series, "dead_units")
        if not events:
            return None
        began = events[0].step
        ordered = in_forward_order(series, (e.layer for e in events if e.layer))
        first = {e.layer for e in events if e.step <= began + self.SAME_UPSET}
        root = next((layer for layer in ordered if layer in first), None)
        root_event = next(e for e in events if e.layer == root)
        found = [evidence(root_event.message, 4.0, events=[root_event])]
        if root and (table := series.table_at()) and table[1].get(root, "grad_norm") == 0.0:
            found.append(evidence(f"{root} receives a gradient of exactly zero.", 1.0))
        injury = self._injury(series, began)
        found.extend(injury)
        origin = series.last_observation(NonFiniteOrigin)
        if origin and origin.step <= began:
            found.append(evidence(f"Numbers were not finite from step {origin.step} on.", -2.0))
        onset = began
        if jump := rate_jump(series, began):
            onset = jump.step
        return Case(
            evidence=found,
            layer=root,
            onset_step=onset,
            explanation=f"{root_event.message} They pass no gradient, so no further step can bring them back."
            + (f" It happened when the learning rate jumped to {jump.after:.3g}." if jump else ""),
            affected_layers=tuple(sorted(ordered, key=lambda layer: (layer != root, ordered.index(layer)))),
            event_ids=event_ids([*events, *warnings_of(series, "update_ratio_too_high", "divergence", "loss_spike")]),
            source=source_of(series, root),
            advice="Give the rectifier a slope below zero (LeakyReLU, GELU), keep the initial bias at or above zero, "
            "and warm the learning rate up.",
            fixes=self._fixes(series, ordered, onset, jump.before if jump else None),
        )

    def _injury(self, series: Series, began: int) -> list[Evidence]:
        overshoots = [e for e in warnings_of(series, "update_ratio_too_high") if e.step <= began]
        if not overshoots:
            return []
        last = overshoots[-1]
        now, then = last_rate(series), rate_at(series, last.step)
        if now <= 0.2 * then and began - last.last_step <= self.AFTERMATH:
            statement = f"An update overshot at step {last.step}, just before; the rate has gone back since."
            return [evidence(statement, 3.0, events=[last])]
        statement = f"Updates overshot from step {overshoots[0].step} on, at a rate that is still in force."
        return [evidence(statement, -3.0, events=overshoots)]

    def _fixes(
        self, series: Series, layers: Sequence[str], onset: int, rate_before: float | None
    ) -> tuple[FixSuggestion, ...]:
        dead = joined(layers)
        fixes = [
            fix(
                "revive_dead_units",
                "Dead units pass half of the inputs again, with the weights they have.",
                layers=dead,
            ),
            fix("reinitialize_layer", "Dead layers begin anew.", layers=dead),
        ]
        rate = last_rate(series)
        if onset > 0 and rate > 0:
            target = rate_before if rate_before is not None and rate_before < rate else rate
            effect = f"The units are as alive as they were before step {onset}, and the rate keeps them so."
            fixes.append(fix("set_learning_rate", effect, rollback_first=True, learning_rate=rounded(target)))
            fixes.append(fix("reinitialize_layer", "All layers begin anew."))
        fixes.append(fix("leaky_slope", "Dead units get a gradient wherever they are.", slope=0.01))
        return tuple(fixes)
