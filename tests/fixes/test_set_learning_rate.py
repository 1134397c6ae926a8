"""The rate of one group."""

from __future__ import annotations

import pytest
import torch

from gradtracer.errors import BadParameter
from tests.fixes.training import classification, live, network, program


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
