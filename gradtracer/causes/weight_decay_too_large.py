"""Weight decay beats the gradient."""

from __future__ import annotations

import numpy as np

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
from gradtracer.records import FixSuggestion, OptimizerDescription
from gradtracer.series import Series


@CAUSES.register
class WeightDecayTooLarge(Cause):
    """The decay term takes away more than the gradient brings.

    What:
        Weights of most layers that shrink from the first step on while the loss stays where it is.

    Why:
        The optimum of loss plus decay is then near zero weights; nothing can be learned at this decay.

    Definition:
        Evidence, with its log-likelihood ratio in nats: decay shrinks most layers and the loss does not fall
        (weights_decay_away): +6; the optimizer has a decay of at least 0.1: +1.5, or none: -6; updates overshot: -1.
        Onset: the first step with this decay.

    Thresholds:
        The rule demands that decay explains the fall of the norms: ln 400 = 6. Decays of 0.1 and above are in most of
        these runs and in a fifth of others: ln 4.5 = 1.5.

    Fixes:
        set_weight_decay to a hundredth, at most 1e-4 (added to the gradient) or 1e-2 (decoupled); or to 0. From a
        rollback where the weights have lost half of their norm.

    References:
        Krogh & Hertz 1991, NIPS. Loshchilov & Hutter 2019, arXiv:1711.05101.
    """

    code = "weight_decay_too_large"
    title = "Weight decay is too large"
    prior = 0.02

    LARGE = 0.1

    def consider(self, series: Series) -> Case | None:
        """Weigh weights that decay shrinks."""
        events = warnings_of(series, "weights_decay_away")
        if not events:
            return None
        found = [evidence(events[0].message, 6.0, events=events)]
        optimizer = series.last_observation(OptimizerDescription)
        known = hyperparameter(series, "weight_decay")
        decay = known or 0.0
        if known == 0:
            found.append(evidence("The optimizer has no weight decay.", -6.0))
        elif decay >= self.LARGE:
            found.append(evidence(f"weight_decay is {decay:g}.", 1.5))
        if overshoots := warnings_of(series, "update_ratio_too_high"):
            found.append(evidence(overshoots[0].message, -1.0, events=overshoots))
        return Case(
            evidence=found,
            layer=events[0].layer,
            onset_step=min(e.step for e in events),
            explanation=f"{events[0].message} With weight_decay {decay:g} and a rate of {last_rate(series):.3g} the "
            "pull towards zero is stronger than that of the data.",
            event_ids=event_ids(events),
            source=optimizer_source(series),
            advice="Lower weight_decay where the optimizer is built, to 1e-4 (added to the gradient) or 1e-2 (AdamW), "
            "and leave biases and normalisations out of it.",
            fixes=self._fixes(series, decay, optimizer.type if optimizer else ""),
        )

    def _fixes(self, series: Series, decay: float, optimizer: str) -> tuple[FixSuggestion, ...]:
        if decay <= 0:
            return ()
        usual = 1e-2 if "AdamW" in optimizer or "Lion" in optimizer else 1e-4
        effect = "The pull of the data is stronger than that toward zero, and the weights grow again."
        return tuple(
            fix("set_weight_decay", effect, rollback_first=self._have_shrunk(series), weight_decay=rounded(value))
            for value in (min(usual, decay / 100), 0.0)
        )

    def _have_shrunk(self, series: Series) -> bool:
        norms = [
            np.sqrt(sum(n**2 for n in table.signal("weight_norm").values() if np.isfinite(n)))
            for _, table in series.tables
            if table.signal("weight_norm")
        ]
        return len(norms) > 1 and bool(norms[-1] < 0.5 * norms[0])
