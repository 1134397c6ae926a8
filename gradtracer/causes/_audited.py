"""Causes that an audit or a rule sees as a fact, so that one finding decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gradtracer.causes._reading import event_ids, evidence, in_forward_order, source_of, warnings_of
from gradtracer.causes.base import Case, Cause
from gradtracer.records import AuditFinding, Evidence, FixSuggestion, SourceLocation
from gradtracer.series import Series


class SeenAsFact(Cause):
    """A cause whose finding names layer and step; a subclass says what else speaks for and against it."""

    findings: ClassVar[tuple[str, ...]]
    """Codes of audit findings, any of which is the fact."""
    ratio: ClassVar[float]
    """Its log-likelihood ratio."""
    what_to_do: ClassVar[str]
    source_is_the_layers: ClassVar[bool] = False

    def consider(self, series: Series) -> Case | None:
        """Weigh the fact, and what a subclass adds."""
        found = series.audit(*self.findings)
        if not found:
            return None
        step = min(f.step for f in found)
        first = [f for f in found if f.step == step]
        layers = in_forward_order(series, (f.layer for f in first if f.layer))
        layer = layers[0] if layers else self.root(series)
        root = next((f for f in first if f.layer == layer), first[0])
        codes = {f.code for f in found}
        events = [e for e in warnings_of(series, "audit") if e.to_state in codes]
        pieces = [evidence(root.detail, self.ratio, events=events, measures=root.measures)]
        pieces.extend(self.more(series, found))
        return Case(
            evidence=pieces,
            layer=layer,
            onset_step=step,
            explanation=root.detail,
            affected_layers=tuple(in_forward_order(series, (f.layer for f in found if f.layer))),
            event_ids=event_ids([*events, *(e for e in warnings_of(series) if e.kind != "audit" and e.step >= step)]),
            source=self.source(series, root, layer),
            advice=self.what_to_do,
            fixes=self.fixes(series, root),
        )

    def more(self, series: Series, found: Sequence[AuditFinding]) -> Sequence[Evidence]:
        """Further evidence."""
        return ()

    def source(self, series: Series, root: AuditFinding, layer: str | None) -> SourceLocation | None:
        """Where the source is to be changed; by default where the finding says."""
        return root.source or (source_of(series, layer) if self.source_is_the_layers else None)

    def root(self, series: Series) -> str | None:
        """The layer, where the finding names none."""
        return None

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """Fixes that can be applied live, best first."""
        return ()
