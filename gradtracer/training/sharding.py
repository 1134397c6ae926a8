"""Parameters of which each rank holds a part (DTensor, as `fully_shard` makes them).

An operation on such a tensor may wait for all other ranks, which may not be tracked: what is read is read of the local
part, and put together by `gradtracer.training.sharded_readings`.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a `torch.distributed.tensor.DTensor`."""
    return hasattr(type(tensor), "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds, sharing its memory; a plain tensor as it is. For use without gradients."""
    return cast(Any, tensor).to_local().detach() if is_sharded(tensor) else tensor


def like(part: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that is laid out as another one is."""
    if not is_sharded(whole) or part.shape != local(whole).shape:
        return part
    kind, spec = cast(Any, type(whole.detach())), cast(Any, whole)
    return kind.from_local(
        part, spec.device_mesh, spec.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
