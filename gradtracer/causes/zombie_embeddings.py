"""Embedding rows move much and get nowhere."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, fix, joined, last_rate, rounded, source_of, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence
from gradtracer.series import Series


@CAUSES.register
class ZombieEmbeddings(Cause):
    """Rows of an embedding are busy and learn nothing.

    What:
        A rate that is too large for the rows, whose gradients come seldom and large; or ids that stand for several
        things and are pulled apart.

    Why:
        The rows stay noise around a point, and so does all that is computed from them.

    Definition:
        Evidence, with its log-likelihood ratio in nats: rows that jump back and forth (zombie_rows): +6; other layers
        overshoot too (update_ratio_too_high elsewhere, or the run diverged): -3.
        Root: the table. Onset: the first of the samples that show it.

    Thresholds:
        Those of the detector: ln 400 = 6. Where the whole model overshoots, the rate is too high for all of it.

    Fixes:
        damp_rows; set_learning_rate.

    References:
        Cohen et al. 2021, arXiv:2103.00065.
    """

    code = "zombie_embeddings"
    title = "Embedding rows move much and get nowhere"
    prior = 0.02

    def consider(self, series: Series) -> Case | None:
        """Weigh tables that oscillate."""
        events = warnings_of(series, "zombie_rows")
        if not events:
            return None
        first = events[0]
        began = int(next((m.value for m in first.evidence if m.name == "first_step"), None) or 0)
        tables = {e.layer for e in events}
        found: list[Evidence] = [evidence(first.message, 6.0, events=[first])]
        others = [e for e in warnings_of(series, "update_ratio_too_high", "divergence") if e.layer not in tables]
        if others:
            found.append(evidence(others[0].message, -3.0, events=others))
        rate, effect = last_rate(series), "Rows no longer jump over their optimum."
        lower = [fix("set_learning_rate", effect, learning_rate=rounded(rate / 10))] if rate > 0 else []
        return Case(
            evidence=found,
            layer=first.layer,
            onset_step=began,
            explanation=first.message,
            affected_layers=tuple(dict.fromkeys(e.layer for e in events if e.layer)),
            event_ids=event_ids(events),
            source=source_of(series, first.layer),
            advice=f"Give {first.layer} a parameter group of its own with a tenth of the rate, or an optimizer with a "
            "rate by row (Adagrad); check that no id stands for two things (hash collisions, shared unknown rows).",
            fixes=(
                fix(
                    "damp_rows",
                    "Noisy rows settle, the others keep their rate.",
                    layers=joined(dict.fromkeys(e.layer for e in events if e.layer)),
                    factor=0.1,
                ),
                *lower,
            ),
        )
