"""Representations get unit length."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, healthy, live, network, program


def _triplets(seed: int, *, rate: float, normalised: bool) -> Program:
    """Hardest triplets: where all rows are one, they have no gradient."""
    model = network(seed)
    centres = torch.randn(6, 12, generator=torch.Generator().manual_seed(seed))

    def loss() -> Tensor:
        y = torch.randint(0, 6, (48,))
        z = model(centres[y] + 0.5 * torch.randn(48, 12))
        z = F.normalize(z, dim=1) if normalised else z
        distance = (z[:, None] - z[None]).square().sum(dim=2)
        same = y[:, None] == y[None]
        hardest = (distance * same).amax(dim=1) - (distance + 1e6 * same).amin(dim=1)
        return F.relu(hardest + 0.5).mean()

    model.centres = centres
    return program(model, torch.optim.Adam(model.parameters(), rate), loss)


def _collapsed(seed: int) -> Program:
    made = _triplets(seed, rate=3e-3, normalised=False)
    torch.nn.init.zeros_(made.model[4].weight)  # type: ignore[index]
    return made


def _healthy_triplets(seed: int) -> Program:
    return _triplets(seed, rate=2e-3, normalised=True)


def _neighbour_accuracy(made: Program) -> float:
    g = torch.Generator().manual_seed(4)
    y = torch.randint(0, 6, (200,), generator=g)
    with torch.no_grad():
        z = made.model(made.model.centres[y] + 0.5 * torch.randn(200, 12, generator=g))  # type: ignore[index]
    distance = torch.cdist(z, z) + 1e6 * torch.eye(200)
    return float((y[distance.argmin(dim=1)] == y).float().mean())


@pytest.mark.slow
def test_rows_that_fell_to_one_point_come_apart() -> None:
    for seed in range(2):
        found = []
        for treated in (False, True):
            made = _collapsed(seed)
            with live(made) as run:
                run.train(60)
                if treated:
                    run.apply("normalize_outputs", layer="4", reinitialize=True)
                run.train(150)
            found.append(_neighbour_accuracy(made))
        assert found[1] > max(0.6, found[0])


@pytest.mark.slow
def test_rows_that_the_loss_normalises_anyway_are_not_hurt() -> None:
    assert_harmless(_healthy_triplets, "normalize_outputs", layer="4")


@pytest.mark.parametrize("reinitialize", [False, True])
def test_undo_leaves_no_hook_and_the_old_weights(reinitialize: bool) -> None:
    assert_undone_exactly(_collapsed, "normalize_outputs", layer="4", reinitialize=reinitialize)


def test_rows_have_the_length_that_was_asked_for() -> None:
    made = healthy(0)
    with live(made) as run:
        before = made.model(torch.ones(3, 12)).detach()
        run.apply("normalize_outputs", layer="4", length=2.0)
        after = made.model(torch.ones(3, 12)).detach()
    torch.testing.assert_close(after, 2 * before / before.square().sum(dim=1, keepdim=True).sqrt())


def test_an_unknown_or_a_normalised_layer_is_refused() -> None:
    with live(healthy(0)) as run:
        run.apply("normalize_outputs", layer="4")
        with pytest.raises(BadParameter, match="normalised already"):
            run.preview("normalize_outputs", layer="4")
        with pytest.raises(BadParameter, match="no layer"):
            run.preview("normalize_outputs", layer="9")
