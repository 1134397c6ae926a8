"""Layers do not train by mistake."""

from __future__ import annotations

from gradtracer.causes._reading import evidence, fix, in_forward_order, optimizer_source, source_of, warnings_of
from gradtracer.causes._wiring import audit_case
from gradtracer.causes.base import CAUSES, Case, Cause
from gradtracer.records import AuditFinding, Evidence, FixSuggestion
from gradtracer.series import Series


@CAUSES.register
class FrozenLayers(Cause):
    """Layers are set not to train by mistake.

    What:
        requires_grad=False on layers that have learnt nothing yet.

    Why:
        The layers that are left train on a random projection of the input, or in front of one.

    Definition:
        Evidence, with its log-likelihood ratio in nats: frozen layers look as drawn at random and stand between
        layers that train: +6, or they come first, as random features would: -1; the loss does not fall
        (`frozen_and_stalled`): +6; the output layer is frozen at random values: +1.5; an optimizer holds frozen
        parameters: +0.5. Root: the first frozen layer in forward order. Onset: step 0.

    Thresholds:
        Random features that are meant do train, so a stall behind frozen random layers is a mistake in nearly all
        runs: ln 400 = 6. A random output layer is frozen on purpose in studies of fixed classifiers alone.

    Fixes:
        unfreeze. In the source: requires_grad_(True), where the layers are frozen.

    References:
        Rahimi and Recht 2007 (random features). Hoffer, Hubara, Soudry 2018, arXiv:1801.04540 (fixed classifiers).
    """

    code = "frozen_layers"
    title = "Layers are frozen by mistake"
    prior = 0.03

    def consider(self, series: Series) -> Case | None:
        """Weigh layers that are frozen at random values."""
        found = series.audit("frozen_at_random")
        if not found:
            return None
        names = in_forward_order(series, (f.layer for f in found if f.layer))
        found = sorted(found, key=lambda f: names.index(f.layer) if f.layer in names else len(names))
        stalled = warnings_of(series, "frozen_and_stalled")
        more: list[Evidence] = []
        if stalled:
            more.append(evidence(stalled[0].message, 6.0, events=stalled))
        if _measure(found, "output_layer"):
            more.append(evidence("The output layer is frozen at random values.", 1.5))
        if _measure(found, "held_by_optimizer"):
            more.append(evidence("An optimizer holds parameters that are frozen.", 0.5))
        is_between = any(f.severity.rank > 0 for f in found)
        case = audit_case(
            series,
            found,
            f"{len(names)} parts do not train: {', '.join(names[:4])}."
            + (" The loss hardly falls, since what is left cannot make up for them." if stalled else ""),
            "Find where requires_grad is set to False (a loop over named_parameters, freeze(), requires_grad_(False)) "
            "and leave these layers out of it; if they are meant to stay as they are, load pretrained weights first.",
            ratio=6.0 if is_between else -1.0,
            more=more,
            source=source_of(series, names[0] if names else None) or optimizer_source(series),
            fixes=self._fixes(names),
        )
        return Case(**{**vars(case), "event_ids": (*case.event_ids, *(e.id for e in stalled))})

    def _fixes(self, names: list[str]) -> tuple[FixSuggestion, ...]:
        if not names:
            return ()
        return (fix("unfreeze", "The layers train with the others.", layers=", ".join(names[:40])),)


def _measure(found: list[AuditFinding], name: str) -> bool:
    return any(m.value for f in found for m in f.measures if m.name == name)
