"""Where a NaN came in is read from the graph of the loss that it spoiled."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtracer import FlowTracker
from gradtracer.journal import Journal
from gradtracer.records import NonFiniteOrigin


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 1)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.exp(self.second(h) * self.scale)
        return self.third(h)


def _origin(spoil: str) -> NonFiniteOrigin:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with FlowTracker(model, optimizer) as tracker:
        for step in range(5):
            x, y = torch.randn(16, 4), torch.rand(16, 1)
            if step == 3 and spoil == "input":
                x[2, 1] = math.nan
            if step == 3 and spoil == "target":
                y[0, 0] = math.inf
            if step == 3 and spoil == "weight":
                with torch.no_grad():
                    model.second.weight[0, 0] = math.nan
            if step == 3 and spoil == "forward":
                model.scale = 1e4
            optimizer.zero_grad()
            out = model(x)
            if step == 3 and spoil == "loss":
                loss = torch.log(out - out).mean()
            elif step == 3 and spoil == "backward":
                loss = torch.sqrt((out - out).square()).mean()
            else:
                loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            tracker.step(loss.item())
    with Journal(tracker.directory) as journal:
        found = [o for o in journal.observations() if isinstance(o, NonFiniteOrigin)]
    assert len(found) >= 1
    assert found[0].step == 3
    return found[0]


def test_a_nan_in_the_batch_is_told_from_one_that_the_model_made() -> None:
    origin = _origin("input")
    assert (origin.where, origin.layer, origin.num_non_finite) == ("data", "first", 1)


def test_an_infinity_in_the_target_is_data_too() -> None:
    assert (_origin("target").where, _origin("target").num_non_finite) == ("data", 1)


def test_a_weight_that_was_spoilt_before_the_step_is_named_with_its_layer() -> None:
    origin = _origin("weight")
    assert (origin.where, origin.layer, origin.num_non_finite) == ("weight", "second", 1)


def test_an_overflow_in_the_forward_pass_is_named_with_operation_and_layer() -> None:
    origin = _origin("forward")
    assert (origin.where, origin.layer, origin.operation) == ("forward", "second", "ExpBackward0")


def test_a_non_finite_loss_expression_is_told_from_the_model() -> None:
    origin = _origin("loss")
    assert (origin.where, origin.operation) == ("loss", "LogBackward0")


def test_a_gradient_that_is_singular_while_the_loss_is_finite_is_backward() -> None:
    origin = _origin("backward")
    assert (origin.where, origin.layer) == ("backward", "third")


def test_a_loss_function_that_was_named_is_where_its_nan_is_looked_for() -> None:
    def log_loss(out: Tensor) -> Tensor:
        return torch.log(out - out).mean()

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with FlowTracker(model, optimizer, loss_fn=log_loss) as tracker:
        log_loss(model(torch.ones(4, 4))).backward()
        optimizer.step()
    with Journal(tracker.directory) as journal:
        (origin,) = [o for o in journal.observations() if isinstance(o, NonFiniteOrigin)][:1]
    assert origin.source is not None
    assert origin.source.file == __file__
    assert origin.source.line == log_loss.__code__.co_firstlineno
