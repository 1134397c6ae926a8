"""Attention saturates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradtracer.causes._reading import event_ids, evidence, fix, joined, last_rate, rounded, source_of, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import AuditFinding, Evidence, FixSuggestion, Measure, NonFiniteOrigin
from gradtracer.series import Series


@CAUSES.register
class AttentionEntropyCollapse(Cause):
    """Attention logits are so large that each query looks at one key alone.

    What:
        Logits without the factor 1/sqrt(d), with the factor upside down, from projections that begin too large, or
        grown without bound by steps that are too large.

    Why:
        The softmax saturates and passes no gradient to queries and keys: where the layer looks is chance, and only its
        values learn.

    Definition:
        Evidence, with its log-likelihood ratio in nats: saturated at scattered keys before the first step: +6; an
        entropy that fell while the loss got no better (attention_collapse): +5; the constant factor is at least twice
        1/sqrt(d): +1; the attention is saturated still at the last sample: +0.5, or it is wide again: -2.
        Root: the first attention layer in time, then in order of the graph. Onset: step 0, or the first bad sample.

    Thresholds:
        Those of the audit `attention`. Saturation at scattered keys before anything was learned has no other reason
        than logits that are too large: it is seen in fewer than one of 400 runs without this fault, ln 400 = 6. A
        collapse along with a worse loss also follows a rate that is too high: ln 150 = 5.

    Fixes:
        scale_attention_logits where it was saturated at the start, set_learning_rate where the collapse came later.

    References:
        Vaswani et al. 2017, section 3.2.1. Zhai et al. 2023, arXiv:2303.06296.
    """

    code = "attention_entropy_collapse"
    title = "Attention collapses onto single keys"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh attention that is saturated."""
        at_start = series.audit("attention_saturated_at_start")
        later = warnings_of(series, "attention_collapse")
        if not at_start and not later:
            return None
        found: list[Evidence] = []
        events = list(later)
        source = None
        if at_start:
            first = at_start[0]
            layer, onset, source = first.layer, first.step, first.source
            told = [e for e in warnings_of(series, "audit") if e.to_state == first.code]
            events += told
            found.append(evidence(first.detail, 6.0, events=told, measures=first.measures))
            factor = next((m for m in first.measures if m.name == "factor_times_sqrt_d"), None)
            if factor is not None:
                found.append(evidence("The factor before the softmax is not 1/sqrt(d).", 1.0, measures=[factor]))
        else:
            layer, onset = later[0].layer, later[0].step
            found.append(evidence(later[0].message, 5.0, events=[later[0]]))
        found += self._now(series, layer)
        origin = series.last_observation(NonFiniteOrigin)
        fixes = _scaled(at_start) if at_start else ()
        rate = last_rate(series)
        if not at_start and rate > 0:
            fixes = (
                fix(
                    "set_learning_rate", "Smaller steps keep the logits from growing.", learning_rate=rounded(rate / 3)
                ),
            )
        return Case(
            evidence=found,
            layer=layer,
            onset_step=onset,
            explanation=found[0].statement
            + (" The softmax passes next to no gradient to queries and keys." if origin is None else "")
            + (f" Numbers are no longer finite from step {origin.step} on: the logits overflow." if origin else ""),
            affected_layers=tuple(dict.fromkeys(x.layer for x in (*at_start, *later) if x.layer)),
            event_ids=event_ids(events),
            source=source or source_of(series, layer),
            advice=f"In {layer}, multiply the logits q @ k.T by 1/sqrt(d), d being the length of one head's query, or "
            "call scaled_dot_product_attention; normalise queries and keys (LayerNorm or RMSNorm) if they grow."
            if at_start
            else "Normalise queries and keys, and warm the learning rate up or lower it.",
            fixes=fixes,
        )

    def _now(self, series: Series, layer: str | None) -> list[Evidence]:
        if layer is None:
            return []
        _, entropies = series.layer(layer, "attention_entropy")
        entropies = entropies[np.isfinite(entropies)]
        if len(entropies) < 2:
            return []
        measure = Measure(name="attention_entropy", value=float(entropies[-1]), baseline=float(entropies[0]))
        if entropies[-1] < 0.3:
            return [evidence("It is saturated still.", 0.5, measures=[measure])]
        return [evidence("It has become wide again.", -2.0, measures=[measure])]


def _scaled(at_start: Sequence[AuditFinding]) -> tuple[FixSuggestion, ...]:
    """The factor that makes the first layer's 1/sqrt(d), else the one that gives its logits unit deviation."""
    measures = {m.name: m.value for m in at_start[0].measures}
    excess = measures.get("factor_times_sqrt_d") or measures.get("attention_logit_std")
    layers = joined(dict.fromkeys(f.layer for f in at_start if f.layer))
    if not excess or excess <= 1 or layers is None:
        return ()
    effect = "The softmax weighs several keys, and queries and keys learn."
    return (fix("scale_attention_logits", effect, layers=layers, factor=float(f"{1 / excess:.4g}")),)
