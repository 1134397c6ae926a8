"""Asks every cause, and ranks what they answer.

Abductive and probabilistic: each cause says what it would make us see, and every piece of evidence, present or absent,
moves its log-odds. The causes, `healthy` and `unknown` then share the probability,
``p_i = exp(log prior_i + sum_k llr_ik) / sum_j exp(log prior_j + sum_k llr_jk)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradtracer.causes import Case, all_causes
from gradtracer.causes._reading import event_ids, warnings_of
from gradtracer.records import CausalHypothesis, Evidence, Measure
from gradtracer.series import Series

HEALTHY, UNKNOWN = "healthy", "unknown"

# Half of the runs that someone asks about have nothing wrong; a sixteenth of the other half is for causes that no
# rule here knows, and the causes share the rest by their priors.
_PRIOR_HEALTHY = 0.5
_PRIOR_UNKNOWN = 0.03125


@dataclass(frozen=True)
class _Weighed:
    code: str
    title: str
    log_weight: float
    case: Case


def diagnose(series: Series) -> tuple[CausalHypothesis, ...]:
    """Possible causes of what a run shows, most probable first; `healthy` competes with them.

    Args:
        series: The run, loaded from its journal.

    Returns:
        Hypotheses whose probabilities sum to 1. `healthy` and `unknown` are always among them; `unknown` stands for
        causes that no rule knows.
    """
    weighed = [_weigh(HEALTHY, "Nothing is wrong", _PRIOR_HEALTHY, _healthy(series))]
    explained: set[str] = set()
    causes = all_causes()
    scale = (1.0 - _PRIOR_HEALTHY - _PRIOR_UNKNOWN) / sum(cause.prior for cause in causes)
    for cause in causes:
        case = cause.consider(series)
        if case is not None:
            weighed.append(_weigh(cause.code, cause.title, scale * cause.prior, case))
            if sum(e.log_likelihood_ratio for e in case.evidence) > 0:
                explained.update(case.event_ids)
    weighed.append(_weigh(UNKNOWN, "A cause that no rule knows", _PRIOR_UNKNOWN, _unknown(series, explained)))
    largest = max(w.log_weight for w in weighed)
    total = sum(math.exp(w.log_weight - largest) for w in weighed)
    ranked = sorted(weighed, key=lambda w: (-w.log_weight, w.code))
    return tuple(_hypothesis(w, math.exp(w.log_weight - largest) / total) for w in ranked)


def _weigh(code: str, title: str, prior: float, case: Case) -> _Weighed:
    return _Weighed(code, title, math.log(prior) + sum(e.log_likelihood_ratio for e in case.evidence), case)


def _hypothesis(weighed: _Weighed, probability: float) -> CausalHypothesis:
    case = weighed.case
    ordered = sorted(case.evidence, key=lambda e: -abs(e.log_likelihood_ratio))
    return CausalHypothesis(
        code=weighed.code,
        title=weighed.title,
        probability=min(1.0, probability),
        layer=case.layer,
        onset_step=case.onset_step,
        explanation=case.explanation,
        evidence_for=tuple(e for e in ordered if e.log_likelihood_ratio > 0),
        evidence_against=tuple(e for e in ordered if e.log_likelihood_ratio <= 0),
        causal_chain=case.event_ids,
        affected_layers=case.affected_layers,
        source=case.source,
        advice=case.advice,
        fixes=case.fixes,
    )


def _healthy(series: Series) -> Case:
    """What speaks for a run in which nothing is wrong.

    A healthy run has a warning in about 3 % of cases, one with a fault that the rules know in about 95 %; further kinds
    of warnings come together, so each adds little.
    """
    warnings = warnings_of(series)
    kinds = sorted({event.kind for event in warnings})
    found: list[Evidence] = []
    if not warnings:
        found.append(Evidence(statement="No rule has reported anything above info.", log_likelihood_ratio=3.0))
    for i, kind in enumerate(kinds[:4]):
        events = [e for e in warnings if e.kind == kind]
        found.append(
            Evidence(
                statement=events[0].message or f"{kind} was reported.",
                log_likelihood_ratio=-3.5 if i == 0 else -1.0,
                measures=events[0].evidence,
                event_ids=event_ids(events),
            )
        )
    progress = _progress(series)
    if progress is not None:
        found.append(progress)
    explanation = (
        "No rule has seen a fault, so nothing needs to be done."
        if not warnings
        else "What was reported may be an episode that the run survives without help."
    )
    return Case(evidence=found, explanation=explanation)


def _progress(series: Series) -> Evidence | None:
    """Whether the loss is below where it began; a healthy run's is in nine of ten cases, a faulty one's in six."""
    losses = series.run("loss")
    if len(losses) < 20 or not np.isfinite(losses).all():
        return None
    first, now = float(np.median(losses[:5])), float(np.median(losses[-5:]))
    measure = Measure(name="loss", value=now, baseline=first)
    if now < first:
        return Evidence(statement="The loss has fallen since the start.", log_likelihood_ratio=0.4, measures=(measure,))
    return Evidence(statement="The loss is not below where it began.", log_likelihood_ratio=-1.4, measures=(measure,))


def _unknown(series: Series, explained: set[str]) -> Case:
    """What speaks for a fault that no rule here knows: warnings that nothing explains.

    Two thirds of such faults raise no warning at all (measured on runs with faults outside the known causes), hence
    2.6 = 3.0 + ln(0.65 / 0.97) for silence, on the scale on which a healthy run has 3.0.
    """
    warnings = warnings_of(series)
    if not warnings:
        silence = "Some faults raise no warning: wrong labels, a leak of the target, a frozen layer."
        return Case(
            evidence=[Evidence(statement=silence, log_likelihood_ratio=2.6)],
            explanation="No rule has seen a fault; not every fault shows in the dynamics of training.",
        )
    left: Sequence[str] = [e.kind for e in warnings if e.id not in explained]
    found = [Evidence(statement="There are warnings.", log_likelihood_ratio=1.0, event_ids=event_ids(warnings))]
    for kind in sorted(set(left))[:3]:
        statement = f"No cause that the rules know explains {kind}."
        found.append(Evidence(statement=statement, log_likelihood_ratio=1.0))
    return Case(
        evidence=found,
        onset_step=min(e.step for e in warnings),
        explanation="Something is wrong, and none of the known causes fits well. The events tell what was seen.",
        event_ids=event_ids(warnings),
        layer=next((e.layer for e in warnings if e.layer), None),
    )
