"""Embedding rows that are never updated."""

from __future__ import annotations

import numpy as np

from gradtracer.causes._reading import event_ids, evidence, source_of, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import Evidence, Measure
from gradtracer.series import Series


@CAUSES.register
class DeadEmbeddings(Cause):
    """Rows of an embedding table are never trained.

    What:
        Ids that are wrong (offsets of fields not added, a vocabulary cut or mapped to few ids), or rows whose gradient
        is lost on its way (a rectifier right behind the table, a mask).

    Why:
        At test time such rows are looked up with their initial values.

    Definition:
        Evidence, with its log-likelihood ratio in nats: fields share the first rows of a table made for all of them
        (embedding_fields_overlap): +7; rows are looked up and never have a gradient (embedding_rows_silent): +5.5, or
        one block of rows does not (embedding_rows_masked): +2; at least 30 % of a table is unseen, and no row has been
        seen for the first time in the later half of at least 20 samples: +2.
        Root: the table. Onset: step 0.

    Thresholds:
        Those of the audit `embedding_rows`: ln 1000 = 7, ln 250 = 5.5. A table that is larger than its data is as
        common in sound programs (a vocabulary of bytes, a tokenizer trained on more) as rows that should be reached and
        are not are in programs that have this fault, hence a small weight and no warning.

    Fixes:
        None that is live: the ids are in the source.

    References:
        PyTorch documentation, nn.Embedding. Rendle 2010, "Factorization machines".
    """

    code = "dead_embeddings"
    title = "Embedding rows are never trained"
    prior = 0.02

    MIN_UNSEEN, MIN_SAMPLES = 0.3, 20

    def consider(self, series: Series) -> Case | None:
        """Weigh rows that have no gradient, and rows that are not looked up."""
        facts = series.audit("embedding_fields_overlap", "embedding_rows_silent", "embedding_rows_masked")
        unseen = self._unseen(series)
        if not facts and unseen is None:
            return None
        found: list[Evidence] = []
        events = [e for e in warnings_of(series, "audit") if e.to_state in {f.code for f in facts}]
        ratios = {"embedding_fields_overlap": 7.0, "embedding_rows_silent": 5.5, "embedding_rows_masked": 2.0}
        for fact in sorted(facts, key=lambda f: -ratios[f.code])[:1]:
            told = [e for e in events if e.to_state == fact.code]
            found.append(evidence(fact.detail, ratios[fact.code], events=told, measures=fact.measures))
        layer = facts[0].layer if facts else None
        if unseen is not None:
            layer = layer or unseen[0]
            measure = Measure(name="unseen_row_fraction", value=unseen[1], threshold=self.MIN_UNSEEN)
            statement = (
                f"{100 * unseen[1]:.0f} % of the rows of {unseen[0]} were never looked up, and no new ones come."
            )
            found.append(evidence(statement, 2.0, measures=[measure]))
        overlap = any(f.code == "embedding_fields_overlap" for f in facts)
        return Case(
            evidence=found,
            layer=layer,
            onset_step=0,
            explanation=f"{found[0].statement} They keep their initial values.",
            event_ids=event_ids(events),
            source=source_of(series, layer),
            advice="Add to each column of ids the sum of the sizes of the columns before it "
            "(offsets = cumsum(field_dims)), so that each field has rows of its own."
            if overlap
            else f"Compare the ids that reach {layer} with the vocabulary that it was made for: are some never in the "
            "data, cut off, or mapped to others? Check what stands between the table and the loss (a rectifier, a "
            "mask, padding_idx).",
        )

    def _unseen(self, series: Series) -> tuple[str, float] | None:
        for layer in dict.fromkeys(name for _, table in series.tables[-1:] for name in table.layers):
            _, shares = series.layer(layer, "unseen_row_fraction")
            shares = shares[np.isfinite(shares)]
            if (
                len(shares) >= self.MIN_SAMPLES
                and shares[-1] >= self.MIN_UNSEEN
                and shares[-1] == shares[len(shares) // 2]
            ):
                return layer, float(shares[-1])
        return None
