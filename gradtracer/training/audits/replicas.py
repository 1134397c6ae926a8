"""Replicas within one model that drift apart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtracer.records import AuditFinding, Measure, clean_name
from gradtracer.training.audits._sampling import Later, spread, thin
from gradtracer.training.audits.base import AUDITS, Audit, AuditContext, finding

_NUM_PAIRS, _NUM_PARAMETERS = 16, 8
_REPLICA_NAME = re.compile(r"(rank|replica|worker|shard|device|gpu|node|proc)s?[_.]?\d+$", re.IGNORECASE)


@dataclass
class _Pair:
    first: str
    second: str
    parameters: list[tuple[nn.Parameter, nn.Parameter]]
    named: bool
    """Whether both names are those of replicas."""
    start: Tensor
    num_equal: int = 0
    over: bool = False


@AUDITS.register
class Replicas(Audit):
    """Whether submodules that were trained as copies of one another still are.

    What:
        Data-parallel replicas in one process whose gradients are no longer averaged, so that each follows its own data.

    Why:
        There is no longer one model: what is saved is the replica of one rank, trained on its share of the data.

    Definition:
        Pairs of sibling modules with the same parameter names and shapes, equal values at the first update and a
        gradient in both. ``d = ||a - b|| / ||a||`` over thin samples, after every update; no unit. replicas_diverged
        (`warning`): d > 1e-6 after the weights had moved and stayed equal for at least 5 updates; or, where both are
        named as replicas (rank0, replica1), from the first update on.

    Thresholds:
        Siblings that merely begin equal (the layers of a transformer encoder, an ensemble) part at their first update;
        a teacher or a target network has no gradient. Replicas that get equal gradients stay equal to the bit; 1e-6
        allows for a reduction in another order.

    Fixes:
        None that is live: average the gradients before every update, and broadcast the weights of one replica.

    References:
        PyTorch documentation, "Distributed Data Parallel", internal design. Li et al. 2020, arXiv:2006.15704.
    """

    code = "replicas"
    every_step = True

    MIN_EQUAL = 5
    TOLERANCE = 1e-6

    def __init__(self) -> None:
        self._pairs: list[_Pair] | None = None
        self._distances: Later[tuple[int, int]] = Later()

    def on_gradients(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Find the pairs, at the first update."""
        if self._pairs is None:
            self._pairs = _pairs(context.model)
        return ()

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        """Compare the pairs after an update."""
        for number, pair in enumerate(self._pairs or ()):
            if not pair.over:
                first, second = _sample(pair, 0), _sample(pair, 1)
                norm = torch.linalg.vector_norm(first).clamp_min(1e-30)
                apart = torch.linalg.vector_norm(first - second) / norm
                moved = torch.linalg.vector_norm(first - pair.start) / norm
                self._distances.put((number, context.step), torch.stack([apart, moved]))
        for (number, step), found in self._distances.take():
            assert self._pairs is not None
            apart, moved = found.tolist()
            yield from self._judge(context, self._pairs[number], step, apart, moved)

    def _judge(
        self, context: AuditContext, pair: _Pair, step: int, apart: float, moved: float
    ) -> Iterable[AuditFinding]:
        if pair.over:
            return
        if apart <= self.TOLERANCE:
            pair.num_equal += moved > 0
            return
        pair.over = True
        if apart > self.TOLERANCE and (pair.num_equal >= self.MIN_EQUAL or pair.named):
            yield finding(
                context,
                "replicas_diverged",
                f"{pair.first} and {pair.second} had the same weights for {pair.num_equal} updates; from step {step} "
                "on they differ.",
                layer=pair.second,
                measures=[Measure(name="relative_distance", value=apart, threshold=self.TOLERANCE)],
            ).model_copy(update={"step": step})


def _pairs(model: nn.Module) -> list[_Pair]:
    found: list[_Pair] = []
    for path, parent in model.named_modules():
        first_of: dict[tuple[tuple[str, torch.Size], ...], list[tuple[str, nn.Module]]] = {}
        for name, child in parent.named_children():
            shapes = tuple((n, p.shape) for n, p in child.named_parameters())
            if not shapes:
                continue
            full = f"{path}.{name}" if path else name
            group = first_of.setdefault(shapes, [])
            if group:
                pair = _pair(group[0][0], group[0][1], full, child)
                if pair is not None and len(found) < _NUM_PAIRS:
                    found.append(pair)
            group.append((full, child))
    return found


def _pair(first: str, a: nn.Module, second: str, b: nn.Module) -> _Pair | None:
    together = list(zip(a.parameters(), b.parameters(), strict=True))
    if any(p is q or p.grad is None or q.grad is None or p.device != q.device for p, q in together):
        return None
    if not all(torch.equal(p, q) for p, q in together):
        return None
    if all(p.numel() and bool((p == p.flatten()[0]).all()) for p, _ in together):
        return None  # constants, such as the scales of normalisations, are equal without being copies
    chosen = spread(together, _NUM_PARAMETERS)
    named = all(_REPLICA_NAME.search(n.rpartition(".")[2]) for n in (first, second))
    pair = _Pair(clean_name(first), clean_name(second), chosen, named, torch.empty(0))
    pair.start = _sample(pair, 0)
    return pair


def _sample(pair: _Pair, side: int) -> Tensor:
    return torch.cat([thin(both[side]).float() for both in pair.parameters])
