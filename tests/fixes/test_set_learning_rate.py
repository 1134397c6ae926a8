"""The rate is held whatever a schedule says."""

from __future__ import annotations

import pytest
import torch

from gradtracer.errors import BadParameter
from tests.fixes.training import (
    Program,
    assert_harmless,
    assert_undone_exactly,
    classification,
    final_losses,
    healthy,
    healthy_adam,
    live,
    network,
    program,
)


def _too_low(seed: int) -> Program:
    model = network(seed)
    return program(model, torch.optim.SGD(model.parameters(), 1e-5), classification(model, seed))


def test_a_run_that_stood_still_learns_at_the_rate_that_is_set() -> None:
    without = final_losses(_too_low, range(3), steps=120)
    treated = final_losses(_too_low, range(3), steps=120, code="set_learning_rate", at=20, learning_rate=0.1)
    assert max(treated) < 0.5 * min(without)


def test_a_slightly_lower_rate_does_not_hurt_a_healthy_run() -> None:
    assert_harmless(healthy, "set_learning_rate", learning_rate=0.04)


@pytest.mark.parametrize("make", [healthy, healthy_adam])
def test_undo_leaves_nothing(make: object) -> None:
    assert_undone_exactly(make, "set_learning_rate", learning_rate=0.5)  # type: ignore[arg-type]


def test_one_group_alone_can_be_set() -> None:
    model = network(0)
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}], lr=0.1
    )
    with live(program(model, optimizer, classification(model, 0))) as run:
        run.train(2)
        shown = run.preview("set_learning_rate", learning_rate=0.01, group=1)
        assert [(c.target, c.old, c.new) for c in shown] == [("optimizers[0].param_groups[1].lr", 0.2, 0.01)]
        used = []
        run.apply("set_learning_rate", learning_rate=0.01, group=1)
        optimizer.register_step_pre_hook(lambda o, *_: used.append([g["lr"] for g in o.param_groups]))
        run.train(1)
        assert used == [[0.1, 0.01]]
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]
        with pytest.raises(BadParameter, match="group 2 does not exist"):
            run.preview("set_learning_rate", learning_rate=0.01, group=2)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e5])
def test_a_rate_outside_of_its_bounds_is_refused(rate: float) -> None:
    with live(healthy(0)) as run, pytest.raises(BadParameter, match="learning_rate"):
        run.preview("set_learning_rate", learning_rate=rate)
