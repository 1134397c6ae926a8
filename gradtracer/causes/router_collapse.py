"""Few experts are used."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, fix, source_of, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence
from gradtracer.series import Series


@CAUSES.register
class RouterCollapse(Cause):
    """A mixture of experts routes everything to the same few experts.

    What:
        A router without a term for balance, or with outputs so large at the start that one expert always wins.

    Why:
        Only chosen experts learn, and only those that learn are chosen.

    Definition:
        Evidence, with its log-likelihood ratio in nats: experts without a gradient over many steps (router_collapse):
        +6.5; nine in ten rows prefer one expert: +0.5.
        Root: the router. Onset: the first sample of the starvation.

    Thresholds:
        Those of the detector. Experts that are frozen on purpose have no gradient wanted and are not counted; ln 600 =
        6.4.

    Fixes:
        balance_experts.

    References:
        Shazeer et al. 2017, arXiv:1701.06538. Fedus, Zoph, Shazeer 2022, arXiv:2101.03961.
    """

    code = "router_collapse"
    title = "The router uses few experts"
    prior = 0.02

    def consider(self, series: Series) -> Case | None:
        """Weigh mixtures with starved experts."""
        events = warnings_of(series, "router_collapse")
        if not events:
            return None
        first = events[0]
        measures = {m.name: m.value for m in first.evidence}
        began = int(measures.get("first_step") or 0)
        found: list[Evidence] = [evidence(first.message, 6.5, events=[first])]
        top = measures.get("routing_top_share")
        if top is not None and top >= 0.9:
            found.append(evidence(f"{100 * top:.0f} % of the rows prefer one expert.", 0.5))
        return Case(
            evidence=found,
            layer=first.layer,
            onset_step=began,
            explanation=f"{first.message} They keep their initial weights and will hardly be chosen again.",
            affected_layers=tuple(dict.fromkeys(e.layer for e in events if e.layer)),
            event_ids=event_ids(events),
            source=source_of(series, first.layer),
            advice="Add a balance term to the loss (E times the sum over experts of share of rows times mean router "
            f"probability, weight about 0.01), begin {first.layer} with small weights, and add noise to its outputs "
            "while training.",
            fixes=(fix("balance_experts", "Experts that were left out are chosen, and learn.", layer=first.layer),)
            if first.layer
            else (),
        )
