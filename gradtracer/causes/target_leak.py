"""The model sees what it must predict."""

from __future__ import annotations

from gradtracer.causes._reading import event_ids, evidence, loss_source, warnings_of
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.series import Series

_CODES = ("looks_ahead", "target_in_input")


@CAUSES.register
class TargetLeak(Cause):
    """The answer is part of the input.

    What:
        A sequence model without its mask, a bidirectional layer in a language model, the target among the features.

    Why:
        The training loss is far too good, and says nothing about a prediction.

    Definition:
        Evidence, with its log-likelihood ratio in nats: looks_ahead at a layer: +7, without a layer (info): +2;
        target_in_input: +6. Onset: 0, since the program is so from the start.

    Thresholds:
        Looking ahead was seen in a copy of the model: 7 = ln 1100. A column that settles the target is a leak, or a
        toy.

    Fixes:
        In the source.

    References:
        Vaswani et al. 2017, arXiv:1706.03762. Kaufman, Rosset, Perlich 2012, ACM TKDD 6(4).
    """

    code = "target_leak"
    title = "The model sees what it must predict"
    prior = 0.015

    def consider(self, series: Series) -> Case | None:
        """Weigh what the audit of leaks found."""
        found = series.audit(*_CODES)
        if not found:
            return None
        events = [e for e in warnings_of(series, "audit") if e.to_state in _CODES]
        best = next((f for f in found if f.layer), found[0])
        weight = {"looks_ahead": 7.0 if best.layer else 2.0, "target_in_input": 6.0}[best.code]
        return Case(
            evidence=[evidence(best.detail, weight, events=events, measures=best.measures)],
            layer=best.layer,
            onset_step=0,
            explanation=best.detail,
            event_ids=event_ids(events),
            source=best.source or loss_source(series),
            advice="Give the layer its causal mask (is_causal=True, attn_mask=triu), make it unidirectional, or pad "
            "the convolution on the left only; then outputs at a time must not change with later inputs."
            if best.code == "looks_ahead"
            else "Remove the column from the inputs, and look for others that are made from the target.",
        )
