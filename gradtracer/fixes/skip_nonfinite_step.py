"""Skip updates whose gradient is not finite."""

from __future__ import annotations

from typing import Any

from gradtracer.fixes._updates import gradients, switch, whole
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


@FIXES.register
class SkipNonfiniteStep(Fix[FixParameters]):
    """Let no update through that has a NaN or an infinity in its gradient, until reverted.

    What:
        Before each update all gradients of the optimizer are checked; where one is not finite, the whole update is
        left out: weights and optimizer state stay as they are. Running statistics of normalisation layers have seen
        the batch by then.

    Why:
        One such update makes every weight non-finite, and nothing after it can be saved.

    Definition:
        An update is skipped if any element of any gradient is NaN or infinite; on every rank, where it is so on one.

    Safety:
        Safe: an update with a finite gradient is not touched.

    Undo:
        Updates are no longer checked.

    References:
        Micikevicius et al. 2018, "Mixed precision training", section 3.2, which skips steps so.
    """

    code = "skip_nonfinite_step"
    title = "Skip updates that are not finite"
    safety = Safety.SAFE
    standing = True
    works_sharded = True
    mends = (
        "attention_fully_masked",
        "ctc_infinite",
        "division_by_zero",
        "empty_mean",
        "log_of_zero",
        "nan_gradient_pow",
        "nan_gradient_sqrt",
        "nan_gradient_where",
        "nan_in_data",
        "unbounded_variance",
    )

    def preview(self, run: LiveRun, parameters: FixParameters) -> list[Change]:
        """That non-finite updates would be skipped."""
        return switch(run, "skip_nonfinite_step", new=True, old=False)

    def apply(self, run: LiveRun, parameters: FixParameters) -> Undo:
        """Check from the next update on."""
        self.preview(run, parameters)

        def before(optimizer: Any) -> None:
            held = gradients(optimizer)
            if run.any_rank(bool(held) and not _all_finite(held)):
                run.skip_update(optimizer)

        return run.around_update(before)


def _all_finite(tensors: list[Any]) -> bool:
    """One pass and one number where all is well; element by element where the norm of a large gradient overflows."""
    import torch

    norms = [whole(n) for n in torch._foreach_norm(tensors)]  # pyright: ignore[reportPrivateImportUsage]
    total = torch.stack([n.to(norms[0].device, torch.float64) for n in norms]).sum()
    return bool(torch.isfinite(total)) or all(bool(whole(torch.isfinite(t).all())) for t in tensors)
