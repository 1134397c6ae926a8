"""What several audits share: thin samples of tensors, and small results on their way to the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

K = TypeVar("K")

THIN = 256
"""Elements of a thin sample."""


def thin(tensor: Tensor, count: int = THIN) -> Tensor:
    """At most `count` evenly spaced elements of a dense tensor, a copy, `[n]`.

    The distance between two has no divisor in common with the length of a row, so that no column is left out for good.
    """
    flat = tensor.detach().flatten()
    return flat[:: _distance(flat.numel(), tensor.shape[-1] if tensor.dim() > 1 else 1, count)][:count].clone()


@lru_cache(maxsize=1024)
def _distance(numel: int, row: int, count: int) -> int:
    distance = max(1, numel // count)
    while distance > 1 and math.gcd(distance, row) > 1:
        distance -= 1
    return distance


def spread(things: Sequence[K], count: int) -> list[K]:
    """At most `count` of them, evenly spaced, the first and the last included."""
    if len(things) <= count:
        return list(things)
    return [things[round(i * (len(things) - 1) / (count - 1))] for i in range(count)]


def has_dense_gradient(parameter: Tensor) -> bool:
    """Whether it has a gradient that can be compared element by element."""
    return parameter.grad is not None and not parameter.grad.is_sparse and parameter.grad.numel() > 0


def parameters_of(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    """All parameters that it holds."""
    return (p for group in optimizer.param_groups for p in group["params"])


class Later(Generic[K]):
    """Small tensors of the device that are read on the host once they have arrived, so that nothing waits for them."""

    def __init__(self) -> None:
        self._sent: list[tuple[K, Tensor, Any]] = []

    def put(self, key: K, tensor: Tensor) -> None:
        """Send a tensor that nobody writes any more."""
        if tensor.device.type != "cuda":
            self._sent.append((key, tensor.detach().cpu(), None))
            return
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._sent.append((key, host, event))

    def take(self) -> list[tuple[K, Tensor]]:
        """What has arrived, in the order in which it was sent."""
        arrived: list[tuple[K, Tensor]] = []
        while self._sent and (self._sent[0][2] is None or self._sent[0][2].query()):
            key, tensor, _ = self._sent.pop(0)
            arrived.append((key, tensor))
        return arrived
