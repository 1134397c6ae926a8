"""Accumulated gradients have the wrong scale or the wrong boundary."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes._reading import evidence, fix, last_rate, rounded, warnings_of, weights_are_damaged
from gradtracer.causes.base import CAUSES
from gradtracer.records import AuditFinding, Evidence, FixSuggestion
from gradtracer.series import Series


@CAUSES.register
class GradientAccumulation(SeenAsFact):
    """Gradients of several batches are summed where their mean is meant, cleared too early, or cleared too late.

    What:
        Loops that call backward several times an update without dividing the loss, that clear the gradients of all but
        the last batch, or that update at every batch and clear at some.

    Why:
        A sum over k batches is k times the gradient that the learning rate was meant for.

    Definition:
        Evidence, with its log-likelihood ratio in nats: an update takes in several backward calls of one loss, not
        averaged: +3; after it updates overshot, the loss diverged or numbers were not finite: +4, or none of these
        happened: -4; the gradients of all batches but the last were cleared unused: +9; the gradient of an update was
        still there at the next one at some updates and not at others: +9. Onset: the first update of this kind.

    Thresholds:
        A sum is seen in a twentieth of healthy runs (ln 20 = 3), with a rate to match; the harm tells: ln 50 = 4. The
        other two are facts: ln 8000 = 9.

    Fixes:
        scale_gradients by 1/k, or set_learning_rate to a k-th of what it is; from a rollback where the weights are
        already damaged. clear_gradients where they are cleared too late. What was cleared too early is lost: that is
        for the source.

    References:
        PyTorch documentation, "Automatic mixed precision examples", section "Gradient accumulation". Goyal et al. 2017,
        arXiv:1706.02677 (rate and batch size).
    """

    code = "gradient_accumulation"
    title = "Accumulated gradients are not averaged"
    prior = 0.02

    findings = ("accumulation_not_averaged", "accumulated_gradients_lost", "gradients_cleared_rarely")
    ratio = 3.0
    what_to_do = (
        "Divide the loss by the number of accumulated batches before backward; call optimizer.step() and then "
        "optimizer.zero_grad() once behind the last of them."
    )

    HARM = ("update_ratio_too_high", "divergence", "loss_spike", "exploding_gradient", "non_finite")

    def more(self, series: Series, found: Sequence[AuditFinding]) -> Sequence[Evidence]:
        """What the sum did, or that the boundary is wrong."""
        if any(f.code != "accumulation_not_averaged" for f in found):
            return [evidence("The boundary of the accumulation is wrong.", 6.0)]
        harm = [e for e in warnings_of(series, *self.HARM) if e.step >= found[0].step]
        if harm:
            return [evidence(harm[0].message, 4.0, events=harm)]
        return [evidence("The run shows no harm from it.", -4.0)]

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """A mean in place of the sum, or the boundary."""
        if root.code == "gradients_cleared_rarely":
            return (fix("clear_gradients", "Each update follows its own gradient."),)
        calls = next((m.value for m in root.measures if m.name == "num_backward_calls" and m.value), None)
        rate = last_rate(series)
        if root.code != "accumulation_not_averaged" or not calls or not rate > 0:
            return ()
        damaged, effect = weights_are_damaged(series, root.step), "Updates are as large as with the mean."
        return (
            fix("scale_gradients", effect, rollback_first=damaged, factor=rounded(1 / calls)),
            fix("set_learning_rate", effect, rollback_first=damaged, learning_rate=rounded(rate / calls)),
        )
