"""Few codes are used."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, fix, source_of, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence
from gradtracer.series import Series


@CAUSES.register
class CodebookCollapse(Cause):
    """A vector quantiser has lost most of its codes.

    What:
        A codebook that begins far from what the encoder puts out, an encoder that moves away faster than the codes, or
        no way back for unused codes.

    Why:
        Only the nearest code is moved, so an unused one stays unused, and the bottleneck stays that narrow.

    Definition:
        Evidence, with its log-likelihood ratio in nats: few codes over many steps (codebook_collapse): +6.5; it was so
        from the first samples on, which speaks for the initialisation: +0.3.
        Root: the codebook. Onset: the first sample of the collapse, 0 where it was within the first ten steps.

    Thresholds:
        Those of the detector, which sees nothing but this: ln 600 = 6.4.

    Fixes:
        revive_codes.

    References:
        van den Oord, Vinyals, Kavukcuoglu 2017, arXiv:1711.00937. Dhariwal et al. 2020, arXiv:2005.00341.
    """

    code = "codebook_collapse"
    title = "Few codes of a codebook are used"
    prior = 0.02

    EARLY = 10

    def consider(self, series: Series) -> Case | None:
        """Weigh codebooks of which little is used."""
        events = warnings_of(series, "codebook_collapse")
        if not events:
            return None
        first = events[0]
        began = next(
            (int(m.value) for m in first.evidence if m.name == "first_step" and m.value is not None), first.step
        )
        found: list[Evidence] = [evidence(first.message, 6.5, events=[first])]
        if began < self.EARLY:
            found.append(evidence("It was so from the start: the codes began where no vector is.", 0.3))
            began = 0
        known = [o.detail for o in series.audit("codebook") if o.layer == first.layer]
        return Case(
            evidence=found,
            layer=first.layer,
            onset_step=began,
            explanation=" ".join([*known, first.message, "Unused codes get no gradient."]),
            affected_layers=tuple(dict.fromkeys(e.layer for e in events if e.layer)),
            event_ids=event_ids(events),
            source=source_of(series, first.layer),
            advice=f"Initialise {first.layer} from encoder outputs of a first batch (k-means, or the vectors "
            "themselves) or uniformly in (-1/K, 1/K); during training replace codes that were not used for some "
            "hundred steps by vectors of the batch; normalise both, or update codes by moving averages.",
            fixes=(fix("revive_codes", "Unused codes move to where vectors are.", codebook=first.layer),)
            if first.layer
            else (),
        )
