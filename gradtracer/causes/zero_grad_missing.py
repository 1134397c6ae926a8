"""Gradients are never cleared."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes._reading import evidence, fix, weights_are_damaged
from gradtracer.causes.base import CAUSES
from gradtracer.records import AuditFinding, Evidence, FixSuggestion
from gradtracer.series import Series


@CAUSES.register
class ZeroGradMissing(SeenAsFact):
    """Nobody calls `zero_grad`, so each step follows the sum of all gradients so far.

    What:
        Loops whose gradient at a step is that of the step before plus the new one.

    Why:
        The sum grows with the number of steps and points where the loss was falling long ago: the run oscillates or
        diverges at a rate that is right.

    Definition:
        Evidence, with its log-likelihood ratio in nats: the gradient that an update had used still stood, to the bit,
        when backward added the next, at three updates in a row: +9; gradients were cleared at some later updates: -4
        (then the boundary of an accumulation is wrong). Onset: the first step with a gradient that was not cleared.

    Thresholds:
        ln 8000 = 9: the fact is read from the training and not inferred; what is left is a loop that wants it so.
        Clearing at some updates and not at others belongs to the other cause in 50 of 51 cases: -4 = -ln 50.

    Fixes:
        clear_gradients, from a rollback where the weights are already damaged. In the source: call
        optimizer.zero_grad() once an update.

    References:
        PyTorch documentation, torch.optim.Optimizer.zero_grad.
    """

    code = "zero_grad_missing"
    title = "Gradients are never cleared"
    prior = 0.02

    findings = ("gradients_never_cleared",)
    ratio = 9.0
    what_to_do = "Call optimizer.zero_grad() once an update, before loss.backward() (or right after optimizer.step())."

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """Clear them for the program."""
        effect = "Each update follows its own gradient."
        return (fix("clear_gradients", effect, rollback_first=weights_are_damaged(series, root.step)),)

    def more(self, series: Series, found: Sequence[AuditFinding]) -> Sequence[Evidence]:
        """Whether they are cleared now and then."""
        rare = series.audit("gradients_cleared_rarely")
        return [evidence(rare[0].detail, -4.0)] if rare else ()
