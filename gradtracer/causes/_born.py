"""What the causes of NaN read: where it was born, and what came before."""

from __future__ import annotations

from gradtracer.causes._reading import (
    event_ids,
    evidence,
    fix,
    non_finite_weights,
    source_of,
    warnings_of,
)
from gradtracer.causes.base import Case
from gradtracer.records import AuditFinding, Evidence, FixSuggestion, Measure, NonFiniteOrigin
from gradtracer.series import Series

SEEN = 7.0
"""The operation was seen at a value where it is not finite: ln 1000, which leaves room for a second one beside it."""
ELSEWHERE = -6.0
"""Another operation, or the data, was seen to be the first."""


def first_origin(series: Series) -> NonFiniteOrigin | None:
    """Where the first NaN of a run was seen."""
    return next((o for o in series.observations if isinstance(o, NonFiniteOrigin)), None)


def first_fault(series: Series) -> AuditFinding | None:
    """The operation that made the first NaN, where the capture saw which."""
    origin = first_origin(series)
    if origin is None:
        return None
    return next(
        (
            o
            for o in series.observations
            if isinstance(o, AuditFinding) and o.step == origin.step and o.detail == origin.detail
        ),
        None,
    )


def born_as(series: Series, *faults: str) -> AuditFinding | None:
    """The first fault, if it is one of these."""
    found = first_fault(series)
    return found if found is not None and found.code in faults else None


def birth_case(series: Series, found: AuditFinding, ratio: float, explanation: str, advice: str) -> Case:
    """The case of an operation that was seen to fail.

    Args:
        series: The run.
        found: The finding that names it.
        ratio: Its log-likelihood ratio.
        explanation: What happened, in a sentence that continues the finding's.
        advice: What to change.
    """
    events = warnings_of(series, "non_finite")
    seen: list[Evidence] = [evidence(found.detail, ratio, events=events, measures=found.measures)]
    source = source_of(series, found.layer) if found.layer else None
    return Case(
        evidence=seen,
        layer=found.layer,
        onset_step=found.step,
        explanation=f"Step {found.step}: {found.detail} {explanation}",
        affected_layers=(found.layer,) if found.layer else (),
        event_ids=event_ids(events),
        source=source or found.source,
        advice=advice,
        fixes=birth_fixes(series),
    )


def birth_fixes(series: Series) -> tuple[FixSuggestion, ...]:
    """What mends a run that has met a NaN while the program stays as it is."""
    effect = "A step that is not finite changes nothing any more."
    return (fix("skip_nonfinite_step", effect, rollback_first=non_finite_weights(series)),)


def elements(found: AuditFinding) -> Measure | None:
    """How many elements the operation failed at."""
    return next((m for m in found.measures if m.name == "elements"), None)
