"""What fixes do so that every rank comes to the same result from its own batches."""

from __future__ import annotations

from typing import Any, Literal


def num_ranks() -> int:
    """How many processes train together; 1 where this one is alone."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def over_ranks(values: Any, how: Literal["mean", "sum", "max", "min", "first"]) -> Any:
    """Combine a tensor with those of the other ranks: a collective, so every rank must come here alike.

    Args:
        values: Of one shape on all ranks.
        how: `first` gives every rank what rank 0 has.

    Returns:
        A tensor of the shape, type and device of `values`; `values` itself where the process is alone.
    """
    import torch
    from torch import distributed

    size = num_ranks()
    if size == 1:
        return values
    on_device = "nccl" in distributed.get_backend()
    shared = values.detach().to("cuda" if on_device else "cpu", copy=True)
    if shared.dtype is torch.bool:
        shared = shared.to(torch.uint8)
    if how == "first":
        distributed.broadcast(shared, src=0)
    else:
        kinds = {"max": distributed.ReduceOp.MAX, "min": distributed.ReduceOp.MIN}
        distributed.all_reduce(shared, op=kinds.get(how, distributed.ReduceOp.SUM))
        if how == "mean":
            shared = shared / size
    return shared.to(values.device, values.dtype)
