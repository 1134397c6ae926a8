"""Replicas are equal again, and stay so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, live, program


def _replicas(seed: int, averaged_until: int) -> Program:
    """Two replicas, each with a half of the classes, whose gradients are averaged for a while."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({f"rank{r}": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for r in (0, 1)})
    model["rank1"].load_state_dict(model["rank0"].state_dict())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    centres = 2 * torch.randn(4, 8)
    step = [0]

    def loss() -> torch.Tensor:
        losses = []
        for r in (0, 1):
            y = torch.randint(2 * r, 2 * r + 2, (16,))
            losses.append(F.cross_entropy(model[f"rank{r}"](centres[y] + torch.randn(16, 8)), y))
        return (losses[0] + losses[1]) / 2

    made = program(model, optimizer, loss)

    def run_step() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if step[0] < averaged_until:
            for a, b in zip(model["rank0"].parameters(), model["rank1"].parameters(), strict=True):
                assert a.grad is not None
                assert b.grad is not None
                mean = (a.grad + b.grad) / 2
                a.grad.copy_(mean)
                b.grad.copy_(mean)
        optimizer.step()
        step[0] += 1
        return value.item()

    made.step = run_step
    model.centres = centres
    return made


def _apart(seed: int) -> Program:
    return _replicas(seed, averaged_until=10)


def _together(seed: int) -> Program:
    return _replicas(seed, averaged_until=10**9)


def _accuracy(made: Program) -> float:
    g = torch.Generator().manual_seed(3)
    y = torch.randint(0, 4, (500,), generator=g)
    x = made.model.centres[y] + torch.randn(500, 8, generator=g)  # type: ignore[index]
    return float((made.model["rank0"](x).argmax(dim=1) == y).float().mean())  # type: ignore[index]


def test_one_replica_knows_what_both_have_seen() -> None:
    for seed in range(2):
        found = []
        for treated in (False, True):
            made = _apart(seed)
            with live(made) as run:
                run.train(20)
                if treated:
                    run.apply("broadcast_parameters", layer="rank1")
                run.train(80)
            found.append(_accuracy(made))
        assert found[1] > found[0] + 0.1
        assert found[1] > 0.85


def test_replicas_stay_equal_to_the_bit() -> None:
    made = _apart(0)
    with live(made) as run:
        run.train(20)
        run.apply("broadcast_parameters", layer="rank1")
        run.train(20)
        first, second = made.model["rank0"], made.model["rank1"]  # type: ignore[index]
        for name, tensor in first.state_dict().items():
            assert torch.equal(tensor, second.state_dict()[name]), name


@pytest.mark.slow
def test_replicas_in_step_are_not_hurt() -> None:
    assert_harmless(_together, "broadcast_parameters", layer="rank1")


def test_undo_gives_the_replicas_their_own_weights_back() -> None:
    made = _apart(0)
    with live(made) as run:
        run.train(20)
        before = {n: t.clone() for n, t in made.model.state_dict().items()}
        undo = run.apply("broadcast_parameters", layer="rank1")
        undo()
        assert all(torch.equal(before[n], t) for n, t in made.model.state_dict().items())


def test_undo_leaves_nothing() -> None:
    assert_undone_exactly(lambda seed: _replicas(seed, averaged_until=0), "broadcast_parameters", layer="rank1")


def test_what_is_no_replica_is_refused() -> None:
    with live(_apart(0)) as run:
        with pytest.raises(BadParameter, match="no sibling before it"):
            run.preview("broadcast_parameters", layer="rank0")
        with pytest.raises(BadParameter, match="no layer"):
            run.preview("broadcast_parameters", layer="rank7")
        with pytest.raises(BadParameter, match="one rank"):
            run.preview("broadcast_parameters")
