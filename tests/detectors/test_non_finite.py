from __future__ import annotations

import math

import pytest

from gradtracer.detectors import DETECTORS
from gradtracer.records import NonFiniteOrigin, Severity
from gradtracer.samples import Sample
from tests.detectors.streams import Layers, events, model, sample

Rule = DETECTORS["non_finite"]
MODEL = model(("a", "Linear"), ("b", "Linear"), ("c", "Linear"))


def at(step: int, *, loss: float = 1.0, norm: float = 1.0, layers: Layers | None = None) -> Sample:
    return sample(step, layers, loss=loss, grad_norm=norm, num_non_finite_grads=3.0 if math.isinf(norm) else 0.0)


def flags(activation: str = "", weight: str = "", gradient: str = "") -> Layers:
    """Layers with a non-finite element, by letter."""
    return {
        name: {
            "num_non_finite_activation": 5.0 * (name in activation),
            "num_non_finite_weight": 2.0 * (name in weight),
            "num_non_finite_grad": 1.0 * (name in gradient),
            "grad_norm": math.inf if name in gradient else 1.0,
        }
        for name in "abc"
    }


def test_finite_numbers_are_no_event() -> None:
    assert events(Rule(), [MODEL, *(at(i, layers=flags()) for i in range(10))]) == []


@pytest.mark.parametrize(
    ("layers", "loss", "state", "layer"),
    [
        (flags(activation="bc", gradient="abc"), math.inf, "non_finite_forward", "b"),
        (flags(activation="bc", weight="bc", gradient="abc"), math.inf, "non_finite_weight", "b"),
        (flags(gradient="abc"), math.inf, "non_finite_loss", None),
        (flags(gradient="ab"), 1.0, "non_finite_backward", "b"),
        (flags(weight="c"), 1.0, "non_finite_weight", "c"),
        (None, math.inf, "non_finite", None),
    ],
)
def test_the_place_is_found_from_the_layers(layers: Layers | None, loss: float, state: str, layer: str | None) -> None:
    stream = [MODEL, *(at(i, layers=flags()) for i in range(5)), at(5, loss=loss, norm=math.inf, layers=layers)]
    (event,) = events(Rule(), stream)
    assert (event.to_state, event.layer, event.step, event.severity) == (state, layer, 5, Severity.CRITICAL)


def test_what_the_capture_saw_goes_before_what_the_layers_suggest() -> None:
    origin = NonFiniteOrigin(step=5, where="loss", operation="LogBackward0", num_non_finite=1)
    (event,) = events(Rule(), [MODEL, origin, at(5, loss=math.inf, norm=math.inf, layers=flags(gradient="abc"))])
    assert (event.to_state, event.layer) == ("non_finite_loss", None)
    assert "LogBackward0" in event.message


def test_a_flood_over_all_layers_is_one_event() -> None:
    flood = [at(i, loss=math.inf, norm=math.inf, layers=flags("abc", "abc", "abc")) for i in range(6, 200)]
    first = at(5, loss=math.inf, norm=math.inf, layers=flags(activation="c", gradient="abc"))
    (event,) = events(Rule(), [MODEL, first, *flood])
    assert (event.to_state, event.layer, event.step, event.last_step) == ("non_finite_forward", "c", 5, 199)


def test_after_finite_steps_a_second_time_is_a_second_event() -> None:
    bad = [at(i, loss=math.inf, norm=math.inf) for i in (5, 20)]
    stream = [*(at(i) for i in range(5)), bad[0], *(at(i) for i in range(6, 20)), bad[1]]
    assert [(e.step, e.open) for e in events(Rule(), stream)] == [(5, False), (20, True)]
