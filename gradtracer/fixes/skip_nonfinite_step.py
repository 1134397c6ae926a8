"""Skip updates whose gradient is not finite."""

from __future__ import annotations

from typing import Any

from gradtracer.errors import BadParameter
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


@FIXES.register
class SkipNonfiniteStep(Fix[FixParameters]):
    """Let no update through that has a NaN or an infinity in its gradient, until reverted.

    What:
        Before each update all gradients of the optimizer are checked; where one is not finite, the whole update is
        left out: weights and optimizer state stay as they are.

    Why:
        One such update makes every weight non-finite, and nothing after it can be saved.

    Definition:
        An update is skipped if any element of any gradient is NaN or infinite.

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
    mends = ("nan_in_data",)

    def preview(self, run: LiveRun, parameters: FixParameters) -> list[Change]:
        """That non-finite updates would be skipped."""
        if not run.optimizers:
            raise BadParameter("no optimizer has stepped yet, so there is no update to skip; try after the first step")
        return [
            Change(target=f"optimizers[{o}].skip_nonfinite_step", old=False, new=True)
            for o in range(len(run.optimizers))
        ]

    def apply(self, run: LiveRun, parameters: FixParameters) -> Undo:
        """Check from the next update on."""

        self.preview(run, parameters)

        def before(optimizer: Any) -> None:
            gradients = [
                p.grad.coalesce().values() if p.grad.is_sparse else p.grad
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            if gradients and not _all_finite(gradients):
                run.skip_update(optimizer)

        return run.around_update(before)


def _all_finite(gradients: list[Any]) -> bool:
    """One pass and one number where all is well; element by element where the norm of a large gradient overflows."""
    import torch

    norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
    total = torch.stack([n.to(norms[0].device, torch.float64) for n in norms]).sum()
    return bool(torch.isfinite(total)) or all(bool(torch.isfinite(g).all()) for g in gradients)
