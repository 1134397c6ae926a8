"""Values exceed half precision."""

from __future__ import annotations

from collections.abc import Sequence

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes._reading import evidence, fix, weights_are_damaged
from gradtracer.causes.base import CAUSES
from gradtracer.records import AuditFinding, Evidence, FixSuggestion
from gradtracer.series import Series


@CAUSES.register
class Fp16Overflow(SeenAsFact):
    """Values above 65,504 become infinite in float16, or a loss scaler finds no scale at which they do not.

    What:
        Activations or attention logits that leave the range of float16, and GradScalers that skip every step.

    Why:
        The loss is NaN, or the run stands still without a word: a skipped step looks like any other.

    Definition:
        Evidence, with its log-likelihood ratio in nats: a float16 operation put out values beyond the range, of finite
        inputs: +8; the loss scale has fallen below 1: +5, or where nothing else was seen +3. Root: the last layer
        before the operation. Onset: the step of it.

    Thresholds:
        ln 3000 = 8: inputs, result and precision are read from the graph. A scale below 1 also comes of any NaN: ln 20
        = 3, or with the overflow ln 150 = 5.

    Fixes:
        keep_in_fp32 of the module around the operation, from before the overflow where weights are no longer finite.

    References:
        Micikevicius et al. 2018, arXiv:1710.03740, section 3. Noune et al. 2022, arXiv:2206.02915.
    """

    code = "fp16_overflow"
    title = "Values exceed half precision"
    prior = 0.02

    findings = ("half_precision_overflow", "loss_scale_collapsed")
    ratio = 8.0
    what_to_do = (
        "Keep this layer out of half precision (torch.autocast(enabled=False) around it, inputs .float()), "
        "normalise its inputs, or use bfloat16."
    )
    source_is_the_layers = True

    def more(self, series: Series, found: Sequence[AuditFinding]) -> Sequence[Evidence]:
        """Whether the scaler gave up, and whether an overflow was seen at all."""
        codes = {f.code for f in found}
        if codes == {"loss_scale_collapsed"}:
            return [evidence("No overflow of an activation was seen; any NaN makes the scale fall.", -5.0)]
        collapsed = [f for f in found if f.code == "loss_scale_collapsed"]
        return [evidence(collapsed[0].detail, 5.0, measures=collapsed[0].measures)] if collapsed else ()

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """Leave half precision where it does not do."""
        if root.code != "half_precision_overflow" or root.layer is None:
            return ()
        around = root.layer.rpartition(".")[0] or root.layer
        effect = f"What {around} computes stays within the range of float32."
        damaged = weights_are_damaged(series, root.step)
        return (
            fix("keep_in_fp32", effect, rollback_first=damaged, layer=around),
            fix("standardize_inputs", "What comes in is of a size that leaves room.", rollback_first=damaged),
        )
