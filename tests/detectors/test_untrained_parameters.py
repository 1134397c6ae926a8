from __future__ import annotations

from gradtracer.detectors import DETECTORS
from gradtracer.records import OptimizerDescription
from tests.detectors.streams import events, model, sample

Rule = DETECTORS["untrained_parameters"]
MODEL = model(("body", "Linear"), ("neck", "Linear"), ("head", "Linear"))


def optimizer(step: int, *missing: str) -> OptimizerDescription:
    return OptimizerDescription(step=step, type="Adam", groups=(), missing=missing)


def test_layers_that_no_optimizer_holds_are_reported_in_forward_order() -> None:
    missing = optimizer(0, "head.weight", "head.bias", "neck.weight")
    found = events(Rule(), [MODEL, missing, *(sample(i, loss=1.0) for i in range(40))])
    assert [(e.layer, e.step, e.last_step, e.evidence[0].value) for e in found] == [
        ("neck", 19, 39, 1.0),
        ("head", 19, 39, 2.0),
    ]


def test_optimizers_that_take_turns_are_given_time() -> None:
    stream = [sample(i, loss=1.0) for i in range(40)]
    assert events(Rule(), [MODEL, optimizer(0, "head.weight"), *stream[:10], optimizer(10), *stream[10:]]) == []


def test_the_event_closes_when_the_parameters_are_added() -> None:
    stream = [sample(i, loss=1.0) for i in range(40)]
    (event,) = events(Rule(), [optimizer(0, "weight"), *stream[:30], optimizer(30), *stream[30:]])
    assert (event.layer, event.last_step, event.open) == ("(root)", 29, False)
