"""Pruned weights come back."""

from __future__ import annotations

from gradtracer.causes._audited import SeenAsFact
from gradtracer.causes._reading import fix, joined, rounded
from gradtracer.causes.base import CAUSES
from gradtracer.records import AuditFinding, FixSuggestion
from gradtracer.series import Series


@CAUSES.register
class PruningMaskLost(SeenAsFact):
    """Weights that were pruned are filled in again, because no mask holds them at zero.

    What:
        A layer that was sparse at one step and is dense some steps later.

    Why:
        The sparsity that the pruning was for is gone.

    Definition:
        Evidence, with its log-likelihood ratio in nats: a large part of a layer's weights was set to zero and is no
        longer, 20 updates later: +8. Root: the first such layer in forward order. Onset: the step of the pruning.

    Thresholds:
        ln 3000 = 8: weights are exactly 0 in numbers only by intent; letting them grow back is a rare scheme.

    Fixes:
        reapply_pruning_mask.

    References:
        Zhu & Gupta 2017, arXiv:1710.01878. PyTorch documentation, "Pruning tutorial".
    """

    code = "pruning_mask_lost"
    title = "Pruned weights come back"
    prior = 0.01

    findings = ("pruned_weights_returned",)
    ratio = 8.0
    what_to_do = (
        "Multiply the weights by the pruning mask after every optimizer.step(), or prune with "
        "torch.nn.utils.prune, which keeps the mask."
    )
    source_is_the_layers = True

    def fixes(self, series: Series, root: AuditFinding) -> tuple[FixSuggestion, ...]:
        """Hold the zeros."""
        layers = joined(dict.fromkeys(f.layer for f in series.audit(*self.findings) if f.layer))
        share = next((m.baseline for m in root.measures if m.name == "zero_share"), None)
        if layers is None or share is None or not 0 < share <= 0.999:
            return ()
        effect = f"{share:.0%} of the weights are zero again, and stay so."
        return (fix("reapply_pruning_mask", effect, layers=layers, share=rounded(share)),)
