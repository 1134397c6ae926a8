"""Weight decay beats the gradient."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, last_rate, optimizer_source, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import OptimizerDescription
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
        None that is live yet: lower weight_decay.

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
        decays = [
            p.value
            for group in (optimizer.groups if optimizer else ())
            for p in group.hyperparameters
            if p.name == "weight_decay" and isinstance(p.value, (int, float))
        ]
        decay = max(decays, default=0.0)
        if decays and decay == 0:
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
        )
