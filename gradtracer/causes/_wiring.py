"""The case of a fault that an audit saw in the program itself."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.causes._reading import event_ids, evidence, source_of, warnings_of
from gradtracer.causes.base import Case
from gradtracer.records import AuditFinding, Evidence, FixSuggestion, SourceLocation
from gradtracer.series import Series

SEEN = 6.5
"""The structure was seen, and stands in one healthy program of some six hundred: ln 650."""


def audited(series: Series, *codes: str, info: bool = False) -> list[AuditFinding]:
    """Findings under these codes, in order; those that are a fault by themselves unless `info`."""
    return [o for o in series.audit(*codes) if info or o.severity.rank > 0]


def audit_case(
    series: Series,
    found: Sequence[AuditFinding],
    explanation: str,
    advice: str,
    *,
    ratio: float = SEEN,
    more: Sequence[Evidence] = (),
    layer: str | None = None,
    onset: int = 0,
    source: SourceLocation | None = None,
    fixes: Sequence[FixSuggestion] = (),
) -> Case:
    """A case that rests on findings.

    Args:
        series: The run.
        found: The findings, the telling one first.
        explanation: What that does, in a sentence that continues the finding's.
        advice: What to change.
        ratio: Log-likelihood ratio of the first finding.
        more: Further evidence.
        layer: The root; by default the first finding's; none where it is empty.
        onset: The first bad step.
        source: Where the source is to be changed; by default the layer's class, else where backward was called.
        fixes: What mends it live, best first.
    """
    first = found[0]
    codes = {f.code for f in found}
    events = [e for e in warnings_of(series, "audit") if e.to_state in codes]
    layer = (layer or None) if layer is not None else first.layer
    return Case(
        evidence=[evidence(first.detail, ratio, events=events, measures=first.measures), *more],
        layer=layer,
        onset_step=onset,
        explanation=f"{first.detail} {explanation}",
        affected_layers=tuple(dict.fromkeys(f.layer for f in found if f.layer)),
        event_ids=event_ids(events),
        source=source or (source_of(series, layer) if layer else None) or first.source,
        advice=advice,
        fixes=tuple(fixes),
    )
