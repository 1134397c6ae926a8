"""Hold pruned weights at zero."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gradtracer.errors import BadParameter
from gradtracer.fixes._modules import choose, keep
from gradtracer.fixes._ranks import over_ranks
from gradtracer.fixes.base import FIXES, Fix, FixParameters, LiveRun, Undo
from gradtracer.records import Change, Safety


class ReapplyPruningMaskParameters(FixParameters):
    """Parameters of `reapply_pruning_mask`."""

    layers: str | None = Field(
        default=None,
        max_length=2000,
        description="Pruned layers, with commas; by default those whose pruning the tracker saw.",
    )
    share: float | None = Field(
        default=None, gt=0, le=0.999, description="Share of zeros, for layers of which the places are not known."
    )


@FIXES.register
class ReapplyPruningMask(Fix[ReapplyPruningMaskParameters]):
    """Set the weights that were pruned to zero again, now and after every update.

    What:
        The places are those at which the weight was zero when it was pruned, as the tracker saw it; where it did not
        (on a device, or late in a long run) the smallest weights are taken in their place.

    Why:
        Without a mask the first update fills pruned weights in again, and what the pruning was for is gone.

    Definition:
        ``W <- W * mask`` after every optimizer step. With `share` alone the mask leaves out that share of the smallest
        ``|W|``.

    Safety:
        Guarded: in a layer that was not pruned it would throw weights away. The loss rises at first, since it was
        computed with more weights than there should be; the watch asks only that it stays finite.

    Undo:
        Weights are as before, and updates move all of them.

    References:
        Zhu & Gupta 2017, arXiv:1710.01878, section 3. Han et al. 2015, arXiv:1506.02626 (by magnitude).
    """

    code = "reapply_pruning_mask"
    title = "Hold pruned weights at zero"
    safety = Safety.GUARDED
    standing = True
    shows_in_loss = False
    loss_may_rise = True
    mends = ("pruning_mask_lost",)
    Parameters = ReapplyPruningMaskParameters

    def preview(self, run: LiveRun, parameters: ReapplyPruningMaskParameters) -> list[Change]:
        """Shares of zeros, as they are and as they would be."""
        return [
            Change(
                target=f"{name}.weight.zero_share",
                old=float((weight == 0).float().mean()),
                new=float(mask.float().mean()),
            )
            for name, weight, mask in _masks(run, parameters)
        ]

    def apply(self, run: LiveRun, parameters: ReapplyPruningMaskParameters) -> Undo:
        """Set to zero, and keep there."""
        # The main rank may have seen places that the others have not.
        masks = [(weight, over_ranks(mask, "first")) for _, weight, mask in _masks(run, parameters)]
        put_back = keep(run, (weight for weight, _ in masks))

        def hold(optimizer: Any) -> None:
            for weight, mask in masks:
                weight.detach().masked_fill_(mask, 0)

        hold(None)
        end = run.around_update(lambda optimizer: None, hold)

        def undo() -> None:
            end()
            put_back()

        return undo


def _masks(run: LiveRun, parameters: ReapplyPruningMaskParameters) -> list[tuple[str, Any, Any]]:
    known = run.pruned_places()
    names = parameters.layers if parameters.layers is not None else ", ".join(known) or None
    if names is None:
        raise BadParameter("the tracker saw no pruning; name the pruned layers, and the share of zeros that they had")
    found: list[tuple[str, Any, Any]] = []
    for name, module in choose(run, names, _has_matrix, "layer with a weight").items():
        weight = module.weight.detach()
        mask = known.get(name)
        if mask is None or mask.shape != weight.shape:
            if parameters.share is None:
                raise BadParameter(f"it is not known which weights of {name} were pruned; pass the share of zeros")
            count = max(1, round(parameters.share * weight.numel()))
            mask = weight.abs() <= weight.abs().flatten().kthvalue(count).values
        found.append((name, module.weight, mask.to(weight.device)))
    return found


def _has_matrix(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and hasattr(weight, "dim") and weight.dim() > 1
