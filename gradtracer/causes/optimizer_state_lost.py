"""The optimizer forgot its state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes._reading import evidence, fix
from gradtracer.causes.base import CAUSES
from gradtracer.records import AuditFinding, Evidence, FixSuggestion, Measure, OptimizerDescription, SourceLocation
from gradtracer.series import Series


@CAUSES.register
class OptimizerStateLost(SeenAsFact):
    """The moments of a running optimizer are gone: it was built anew or loaded without its state.

    What:
        Adam or momentum that starts from nothing in the middle of a run.

    Why:
        The first updates after that are as large as the rate allows in every direction; the loss jumps.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the state was there and is gone, under an optimizer of the same
        kind with the same settings: +8; the loss jumped within 20 steps: +1. Onset: the first update without it.

    Thresholds:
        Whoever begins a new phase on purpose changes the settings or the parameters: ln 3000 = 8. The loss jumps in
        three quarters of these runs: ln 3 = 1.

    Fixes:
        warmup over 100 updates, by when fresh second moments rest on enough batches; from a rollback, since the first
        update without them has done harm already. In the source: load the optimizer's state dict.

    References:
        PyTorch documentation, "Saving and loading a general checkpoint for inference and/or resuming training".
    """

    code = "optimizer_state_lost"
    title = "The optimizer lost its state"
    prior = 0.01

    findings = ("optimizer_state_lost",)
    ratio = 8.0
    what_to_do = (
        "Where the run resumes, call optimizer.load_state_dict(checkpoint['optimizer']) on the optimizer that "
        "goes on, and build it once, outside the loop."
    )

    def source(self, series: Series, root: AuditFinding, layer: str | None) -> SourceLocation | None:
        """Where the optimizer is built that has no state."""
        optimizer = series.last_observation(OptimizerDescription)
        return (optimizer.source if optimizer else None) or root.source

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """A slow start for the new moments."""
        effect = "The first updates with fresh moments are small, and the loss does not jump."
        return (fix("warmup", effect, rollback_first=True, steps=100),)

    def more(self, series: Series, found: Sequence[AuditFinding]) -> Sequence[Evidence]:
        """Whether the loss jumped."""
        step = found[0].step
        losses, steps = series.run("loss"), series.steps
        before = losses[(steps >= step - 20) & (steps < step)]
        after = losses[(steps >= step) & (steps <= step + 20)]
        before, after = before[np.isfinite(before)], after[np.isfinite(after)]
        if len(before) < 5 or len(after) < 2 or after.max() <= before.max():
            return ()
        measure = Measure(name="loss", value=float(after.max()), baseline=float(before.max()))
        return [evidence("The loss jumped above all it had been in the 20 steps before.", 1.0, measures=[measure])]
