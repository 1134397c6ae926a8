"""Frequent rows take the gradient."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, fix, joined, source_of, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence
from gradtracer.series import Series


@CAUSES.register
class GradientStarvation(Cause):
    """Rare rows of an embedding receive far less gradient than their look-ups are worth.

    What:
        A loss that is dominated by frequent items, by its weights or because the rare ones are masked or crowded out.

    Why:
        What is rare is not learned, though it is in the data.

    Definition:
        Evidence, with its log-likelihood ratio in nats: rare rows go without (starved_rows): +5.5.
        Root: the table. Onset: the first of the samples that show it.

    Thresholds:
        Those of the detector: ln 250 = 5.5.

    Fixes:
        equalize_row_updates; weights and sampling are in the source.

    References:
        Pezeshki et al. 2021, arXiv:2011.09468. Duchi, Hazan, Singer 2011 (Adagrad).
    """

    code = "gradient_starvation"
    title = "Frequent rows take the gradient of rare ones"
    prior = 0.02

    def consider(self, series: Series) -> Case | None:
        """Weigh tables whose rare rows starve."""
        events = warnings_of(series, "starved_rows")
        if not events:
            return None
        first = events[0]
        began = int(next((m.value for m in first.evidence if m.name == "first_step"), None) or 0)
        found: list[Evidence] = [evidence(first.message, 5.5, events=[first])]
        return Case(
            evidence=found,
            layer=first.layer,
            onset_step=began,
            explanation=f"{first.message} Rare rows keep their initial values.",
            affected_layers=tuple(dict.fromkeys(e.layer for e in events if e.layer)),
            event_ids=event_ids(events),
            source=source_of(series, first.layer),
            advice="Weight the loss by inverse frequency, draw rare items more often, or use an optimizer with a rate "
            f"by row (Adagrad, Adam) for {first.layer}; check that no mask removes rare items from the loss.",
            fixes=(
                fix(
                    "equalize_row_updates",
                    "Rare rows of a batch move as far as the usual one.",
                    layers=joined(dict.fromkeys(e.layer for e in events if e.layer)),
                ),
            ),
        )
