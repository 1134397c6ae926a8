"""Fixes that look at batches come to the same weights on all ranks, each of which has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradtracer import FlowTracker
from gradtracer.fixes import get_fix
from tests.training.rank_programs import launch


class Everything(nn.Module):
    """A layer of each kind that is mended, some in need of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.BatchNorm1d(16, momentum=1e-3), nn.Linear(16, 16)
        self.codebook, self.head = nn.Embedding(8, 16), nn.Linear(16, 1)
        with torch.no_grad():
            self.second.bias[:9] = -30.0
            self.codebook.weight.mul_(20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.second(F.relu(self.norm(self.first(x)))))
        z = self.first(x)
        codes = self.codebook(torch.cdist(z.detach(), self.codebook.weight.detach()).argmin(dim=1))
        return F.binary_cross_entropy_with_logits(self.head(h)[:, 0], y) + F.mse_loss(codes, z.detach())


def _mended(rank: int, folder: Path, code: str, parameters: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    plain = Everything()
    model = DistributedDataParallel(plain, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(100 + rank)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        y = (torch.rand(16, generator=generator) < 0.2).float()
        return 5 + 3 * torch.randn(16, 6, generator=generator) + y[:, None], y

    def replay(i: int) -> Tensor:
        return plain(*batch(torch.Generator().manual_seed(1000 * rank + i)))

    with FlowTracker(plain, optimizer, serve=False, replay=replay) as tracker:
        for i in range(12):
            if i == 4:
                fix = get_fix(code)
                fix.apply(tracker._run, fix.parse(parameters))
            optimizer.zero_grad()
            loss = model(*batch(generator))
            loss.backward()
            optimizer.step()
            tracker.step(loss.item())
        assert not tracker.broken_reason
    found = dict(plain.named_parameters())
    if code == "recalibrate_batchnorm":
        found = dict(plain.named_buffers())
    if code == "standardize_inputs":
        (hook,) = (h for h in plain.first._forward_pre_hooks.values() if type(h).__name__ == "Standardize")
        found["mean"], found["deviation"] = hook.mean, hook.deviation
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "parameters"),
    [
        ("reinitialize_layer", {}),
        ("revive_dead_units", {"layers": "second"}),
        ("layer_scale_init", {"layers": "first, second, head", "centre": True}),
        ("standardize_inputs", {"layer": "first"}),
        ("reapply_pruning_mask", {"layers": "first", "share": 0.5}),
        ("revive_codes", {"codebook": "codebook", "encoder": "first", "patience": 2}),
        ("weigh_classes", {"layer": "head"}),
    ],
)
def test_weights_are_equal_on_all_ranks_afterwards(tmp_path: Path, code: str, parameters: dict[str, Any]) -> None:
    first, second = launch(_mended, tmp_path, code, parameters)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
