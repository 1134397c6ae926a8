"""Numbers of gradients and weights that are sharded over ranks: of the whole, from what each rank reads of its part."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from gradtracer.training.rank_mail import RankMail
from gradtracer.training.readings import Numbers, OpenStep
from gradtracer.training.sharding import is_sharded, local

_TOPIC = "gradients"


def _is_counted(tensor: Tensor, rank: int) -> bool:
    """Whether this rank's part counts where parts are summed: of equal copies only the first does."""
    if not is_sharded(tensor):
        return rank == 0
    coordinate = cast(Any, tensor).device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        at == 0 or not placement.is_replicate()
        for at, placement in zip(coordinate, cast(Any, tensor).placements, strict=True)
    )


class ShardedReadings:
    """Puts together what each rank read of its part of the gradients.

    Squares of norms and sums add up over parts, so norms and means are those of one process on the global batch.

    Args:
        parameters: The model's.
        mail: Carries the parts.
        rank: Of this process.
    """

    def __init__(self, parameters: Sequence[Tensor], mail: RankMail, rank: int) -> None:
        self._mail, self._rank = mail, rank
        self._counted = np.asarray([_is_counted(p, rank) for p in parameters], dtype=np.float64)
        self._local = np.asarray([local(p.detach()).numel() for p in parameters], dtype=np.float64)
        self._numel = np.asarray([p.numel() for p in parameters], dtype=np.float64)
        self._waiting: deque[tuple[OpenStep, Numbers]] = deque()

    def put(self, step: OpenStep, numbers: Numbers) -> None:
        """A step's numbers of the local parts."""
        index = step.index
        rows = [numbers.grad_norms**2]
        if step.sampled and index:
            rows += [numbers.grad_means * self._local[index], numbers.weight_norms**2]
        packed = np.zeros((len(rows), len(self._numel)))
        with np.errstate(invalid="ignore"):
            for row, values in zip(packed, rows, strict=True):
                row[index] = np.where(self._counted[index] > 0, values, 0.0)
        self._mail.post(_TOPIC, step.step, packed.reshape(-1))
        self._waiting.append((step, numbers))

    def take(self) -> list[tuple[OpenStep, Numbers]]:
        """Steps whose parts are there, in order, with the numbers of the whole; without any where parts are missing."""
        if self._rank != 0:
            done = [(step, _without_gradients(step, numbers)) for step, numbers in self._waiting]
            self._waiting.clear()
            return done
        return [self._whole(parts) for _, parts in self._mail.take(_TOPIC)]

    def _whole(self, parts: Sequence[np.ndarray] | None) -> tuple[OpenStep, Numbers]:
        step, numbers = self._waiting.popleft()
        if parts is None or not step.index:
            return step, _without_gradients(step, numbers)
        num = len(self._numel)
        with np.errstate(all="ignore"):
            index = step.index
            norms = np.sqrt(np.sum([part[:num] for part in parts], axis=0))[index]
            if not step.sampled:
                return step, replace(numbers, grad_norms=norms)
            if any(len(part) < 3 * num for part in parts):  # a step that only this rank has looked at closely
                unknown = np.full(len(index), np.nan)
                return step, replace(numbers, grad_norms=norms, grad_means=unknown, weight_norms=unknown)
            sums, squares = (np.sum([part[k * num : (k + 1) * num] for part in parts], axis=0)[index] for k in (1, 2))
            means = sums / self._numel[index]
            return step, replace(numbers, grad_norms=norms, grad_means=means, weight_norms=np.sqrt(squares))


def _without_gradients(step: OpenStep, numbers: Numbers) -> Numbers:
    step.index = []
    nothing = np.empty(0)
    return replace(numbers, grad_norms=nothing, grad_means=nothing, weight_norms=nothing)
