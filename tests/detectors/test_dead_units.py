from __future__ import annotations

import math

import pytest

from gradtracer.detectors import DETECTORS
from gradtracer.records import Severity
from gradtracer.samples import Sample
from tests.detectors.streams import events, model, sample

Rule = DETECTORS["dead_units"]
MODEL = model(("fc1", "Linear"), ("act", "ReLU", "fc1"), ("fc2", "Linear", "act"))


def at(
    step: int,
    dead: float,
    *,
    zeros: float | None = None,
    rows: float | None = None,
    loss: float = 1.0,
    grad: float = 1.0,
) -> Sample:
    layers = {
        "fc1": {"zero_grad_fraction": dead if rows is None else rows, "grad_norm": grad},
        "act": {
            "dead_unit_fraction": dead,
            "activation_zero_fraction": dead + 0.5 * (1 - dead) if zeros is None else zeros,
        },
        "fc2": {"zero_grad_fraction": 0.0, "grad_norm": 1.0},
    }
    return sample(step, layers, loss=loss, grad_norm=1.0)


def test_a_dead_rectifier_is_charged_to_the_layer_that_feeds_it() -> None:
    (event,) = events(Rule(), [MODEL, *(at(i, 1.0, grad=0.0) for i in range(5))])
    assert (event.layer, event.to_state, event.step, event.severity) == ("fc1", "dead", 0, Severity.CRITICAL)


def test_a_layer_that_outputs_only_zeros_is_dead_at_once_although_its_units_are_not_counted_yet() -> None:
    stream = [at(i, 0.0) for i in range(5)] + [at(i, 0.0, zeros=1.0, rows=1.0) for i in range(5, 9)]
    assert [(e.to_state, e.step) for e in events(Rule(), [MODEL, *stream])] == [("dead", 5)]


def test_the_layer_is_found_through_a_normalisation() -> None:
    description = model(
        ("fc1", "Linear"), ("norm", "BatchNorm1d", "fc1"), ("act", "ReLU", "norm"), ("fc2", "Linear", "act")
    )
    (event,) = events(Rule(), [description, *(at(i, 1.0) for i in range(5))])
    assert event.layer == "fc1"


def injured(losses_after: float, *, zeros_after: float | None = None, sudden: bool = True) -> list[Sample]:
    learning = [at(i, 0.05, loss=2.3 * 0.9**i) for i in range(20)]
    between = [] if sudden else [at(20 + 30 * k, 0.05 + 0.06 * k, loss=losses_after) for k in range(10)]
    after = [at(400 + i, 0.65, zeros=zeros_after, loss=losses_after) for i in range(20)]
    return [*learning, *between, *after]


def test_a_layer_that_loses_most_of_its_units_at_once_and_with_them_what_it_had_learned_is_dying() -> None:
    (event,) = events(Rule(), [MODEL, *injured(2.2)])
    assert (event.layer, event.to_state, event.severity) == ("fc1", "dying", Severity.WARNING)


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(injured(0.1), id="the loss goes on falling: the layer grows sparse"),
        pytest.param(injured(2.2, sudden=False), id="gradual"),
        pytest.param(injured(2.2, zeros_after=0.52), id="silent before, only counted late"),
        pytest.param([at(i, 0.4, loss=2.3 * 0.9**i) for i in range(50)], id="some dead units"),
        pytest.param([at(i, 1.0, rows=0.0) for i in range(50)], id="the gradient of all units arrives"),
    ],
)
def test_what_a_healthy_rectifier_does_is_not_reported(stream: list[Sample]) -> None:
    assert events(Rule(), [MODEL, *stream]) == []


FUNCTIONAL = model(("fc1", "Linear"), ("fc2", "Linear"), ("head", "Linear"))


def functional(step: int, *, mean: float, norm: float = 1.0) -> Sample:
    layers = {
        "fc1": {"zero_grad_fraction": 1.0, "activation_mean": 0.1, "activation_std": 0.5},
        "fc2": {"zero_grad_fraction": 1.0, "activation_mean": mean, "activation_std": 0.5},
        "head": {"zero_grad_fraction": 1.0, "activation_mean": -0.1, "activation_std": 0.0},
    }
    return sample(step, layers, loss=2.3, grad_norm=norm)


def test_a_functional_rectifier_is_seen_by_negative_outputs_without_a_gradient() -> None:
    (event,) = events(Rule(), [FUNCTIONAL, *(functional(i, mean=-8.0) for i in range(5))])
    assert (event.layer, event.to_state) == ("fc2", "dead")


def test_zero_gradients_for_another_reason_are_no_dead_units() -> None:
    assert events(Rule(), [FUNCTIONAL, *(functional(i, mean=0.0) for i in range(5))]) == []
    assert events(Rule(), [FUNCTIONAL, *(functional(i, mean=-8.0, norm=0.0) for i in range(5))]) == []


def test_without_a_description_the_rectifier_itself_is_named() -> None:
    (event,) = events(Rule(), [at(i, 1.0) for i in range(4)])
    assert event.layer == "act"


def test_unsampled_steps_say_nothing() -> None:
    assert Rule().assess(sample(0, loss=math.inf)) is None
