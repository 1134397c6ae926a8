"""Rare classes get the say of frequent ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer.errors import BadParameter
from tests.fixes.training import Program, assert_harmless, assert_undone_exactly, healthy, live, program


def _rare(seed: int, *, classes: int = 2, share: float = 0.05) -> Program:
    """All but the first class are rare; two classes have one logit."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1 if classes == 2 else classes))
    centres = 0.6 * torch.randn(classes, 6)

    def loss() -> Tensor:
        y = torch.where(torch.rand(128) < share, torch.randint(1, classes, (128,)), 0)
        out = model(centres[y] + torch.randn(128, 6))
        if classes == 2:
            return F.binary_cross_entropy_with_logits(out[:, 0], y.float())
        return F.cross_entropy(out, y)

    model.centres = centres
    return program(model, torch.optim.Adam(model.parameters(), 3e-3), loss)


def _rare_of_four(seed: int) -> Program:
    return _rare(seed, classes=4, share=0.1)


def _balanced_accuracy(made: Program) -> float:
    g = torch.Generator().manual_seed(1)
    recalls = []
    for label, centre in enumerate(made.model.centres):  # type: ignore[arg-type]
        out = made.model(centre + torch.randn(500, 6, generator=g))
        answers = (out[:, 0] > 0).long() if out.shape[1] == 1 else out.argmax(dim=1)
        recalls.append(float((answers == label).float().mean()))
    return sum(recalls) / len(recalls)


@pytest.mark.parametrize("make", [_rare, _rare_of_four])
def test_rare_classes_are_found(make: object) -> None:
    for seed in range(2):
        found = []
        for treated in (False, True):
            made = make(seed)  # type: ignore[operator]
            with live(made) as run:
                run.train(40)
                if treated:
                    run.apply("weigh_classes")
                run.train(100)
            found.append(_balanced_accuracy(made))
        assert found[1] > found[0] + 0.05


def test_one_logit_is_weighted_as_pos_weight_does() -> None:
    made = _rare(0)
    gradients: list[Tensor] = []
    with live(made) as run:
        run.train(2)
        undo = run.apply("weigh_classes", layer="2")
        x, y = torch.randn(400, 6), (torch.rand(400) < 0.1).float()
        made.model.zero_grad()
        out = made.model(x)
        F.binary_cross_entropy_with_logits(out[:, 0], y).backward()
        gradients.append(made.model[2].weight.grad.double().clone())  # type: ignore[index]
        made.model.zero_grad()
        undo()
    positives = float(y.sum())
    weights = torch.where(y > 0, 400 / (2 * positives), 400 / (2 * (400 - positives)))
    out = made.model(x)
    (F.binary_cross_entropy_with_logits(out[:, 0], y, weight=weights)).backward()
    expected = made.model[2].weight.grad.double()  # type: ignore[index]
    torch.testing.assert_close(gradients[0], expected, rtol=1e-4, atol=1e-7)


def test_the_bias_is_moved_once_to_where_the_weights_want_it() -> None:
    made = _rare(0)
    bias = made.model[2].bias  # type: ignore[index]
    with live(made) as run:
        run.train(100)
        before = bias.detach().clone()
        run.apply("weigh_classes")
        run.train(10)
        moved = float((bias.detach() - before)[0])
        assert 2.0 < moved < 4.0
        run.train(20)
        assert abs(float((bias.detach() - before)[0]) - moved) < 0.5


@pytest.mark.slow
def test_even_classes_are_not_hurt() -> None:
    assert_harmless(healthy, "weigh_classes")


@pytest.mark.parametrize("make", [_rare, _rare_of_four])
def test_undo_leaves_nothing(make: object) -> None:
    assert_undone_exactly(make, "weigh_classes", in_force=12)  # type: ignore[arg-type]


def test_an_unknown_layer_is_refused() -> None:
    with live(healthy(0)) as run:
        with pytest.raises(BadParameter, match="no layer 'x'"):
            run.preview("weigh_classes", layer="x")
        with pytest.raises(BadParameter, match="max_weight"):
            run.preview("weigh_classes", max_weight=1.0)
