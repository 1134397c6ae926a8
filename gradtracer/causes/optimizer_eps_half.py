"""The optimizer's epsilon is zero in half precision."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes._reading import evidence, fix, non_finite_weights, optimizer_source, warnings_of
from gradtracer.causes.base import CAUSES
from gradtracer.records import AuditFinding, Evidence, FixSuggestion, NonFiniteOrigin, SourceLocation
from gradtracer.series import Series


@CAUSES.register
class OptimizerEpsHalf(SeenAsFact):
    """Adam's epsilon rounds to 0 in float16, so that a small gradient is divided by 0.

    What:
        Half-precision parameters under an adaptive optimizer with its default epsilon.

    Why:
        The update of a weight with a small gradient is 0/0, and all weights are lost at the first steps.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the epsilon is 0 in the precision of the parameters: +7;
        numbers were not finite after an update: +3; they came from the data: -5. Onset: the first update.

    Thresholds:
        The epsilon is a fact, and with a gradient that is 0 somewhere the NaN follows: ln 1000 = 7; that it came: ln 20
        = 3.

    Fixes:
        set_epsilon to 1e-4, of the order of the root of float16's smallest number, or to 1e-3; from a rollback where
        weights are no longer finite. In the source: float32 parameters with autocast.

    References:
        Kingma & Ba 2015, arXiv:1412.6980, algorithm 1. Micikevicius et al. 2018, arXiv:1710.03740, section 3.1 (master
        weights).
    """

    code = "optimizer_eps_half"
    title = "Epsilon is zero in half precision"
    prior = 0.01

    findings = ("epsilon_underflows",)
    ratio = 7.0
    what_to_do = "Keep the parameters in float32 and use torch.autocast, or give the optimizer eps=1e-4."

    def source(self, series: Series, root: AuditFinding, layer: str | None) -> SourceLocation | None:
        """Where the optimizer is built."""
        return optimizer_source(series) or root.source

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """An epsilon that float16 holds."""
        return tuple(
            fix(
                "set_epsilon",
                "A small gradient is divided by a number above 0.",
                rollback_first=non_finite_weights(series),
                epsilon=epsilon,
            )
            for epsilon in (1e-4, 1e-3)
        )

    def more(self, series: Series, found: Sequence[AuditFinding]) -> Sequence[Evidence]:
        """Whether the update gave NaN."""
        events = warnings_of(series, "non_finite")
        if not events:
            return ()
        data = any(o.where == "data" for o in series.observations if isinstance(o, NonFiniteOrigin))
        return [evidence(events[0].message, -5.0 if data else 3.0, events=events)]
