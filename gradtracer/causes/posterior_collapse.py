"""A latent is ignored."""

from __future__ import annotations

import numpy as np

from gradtracer.causes._reading import event_ids, evidence, fix, loss_source, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, Measure
from gradtracer.series import Series


@CAUSES.register
class PosteriorCollapse(Cause):
    """The divergence term has won: the latent is the prior for every input.

    What:
        A reconstruction averaged over the data's dimensions beside a divergence summed over latents, a weight of the
        divergence that is too large or comes too early, or a decoder that needs no latent.

    Why:
        Samples and codes are noise; the reconstruction is that of a model without a latent.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the latent carries nothing (posterior_collapse): +6.5; it has
        never carried more than it did at the start: +0.5, or it carried ten times more once: -0.5 (then something came
        in between).
        Root: the layer that makes the means. Onset: the first sample of the collapse.

    Thresholds:
        Those of the detector; nothing else moves both mu and sigma onto the prior and keeps them there: ln 600 = 6.4.

    Fixes:
        free_latent_bits; the weight of the divergence is in the source.

    References:
        Bowman et al. 2016, arXiv:1511.06349. Lucas, Tucker, Grosse, Norouzi 2019, arXiv:1911.02469.
    """

    code = "posterior_collapse"
    title = "The latent carries nothing"
    prior = 0.02

    def consider(self, series: Series) -> Case | None:
        """Weigh latents that are their prior."""
        events = warnings_of(series, "posterior_collapse")
        if not events:
            return None
        first = events[0]
        began = next(
            (int(m.value) for m in first.evidence if m.name == "first_step" and m.value is not None), first.step
        )
        found: list[Evidence] = [evidence(first.message, 6.5, events=[first])]
        _, carried = series.layer(first.layer or "", "latent_information")
        carried = carried[np.isfinite(carried)]
        if len(carried) > 3:
            measure = Measure(
                name="latent_information", value=float(carried.max()), baseline=float(carried[0]), unit="nats"
            )
            if carried.max() <= 2.0 * carried[0]:
                found.append(evidence("It has never carried more than at the start.", 0.5, measures=[measure]))
            elif carried.max() > 10.0 * carried[0]:
                found.append(evidence("It carried ten times more once than at the start.", -0.5, measures=[measure]))
        return Case(
            evidence=found,
            layer=first.layer,
            onset_step=began,
            explanation=f"{first.message} The divergence outweighs what the reconstruction gains from the latent.",
            affected_layers=tuple(dict.fromkeys(e.layer for e in events if e.layer)),
            event_ids=event_ids(events),
            source=loss_source(series),
            advice="Reduce both terms alike: sum the reconstruction over pixels or tokens and the divergence over "
            "latents, then average over examples. Else raise the weight of the divergence from 0 over the first "
            "thousands of steps, leave each latent some free bits, or weaken the decoder.",
            fixes=(fix("free_latent_bits", "Each latent carries about a nat before the divergence counts."),),
        )
