from __future__ import annotations

import math

import pytest

from gradtracer.detectors import DETECTORS
from gradtracer.records import Severity
from gradtracer.samples import Sample
from tests.detectors.streams import announcements, costly, events, sample

Rule = DETECTORS["update_ratio_too_high"]


def step(i: int, ratio: float, *, grad: float = 1.0, weight: float = 5.0, loss: float = 1.0) -> Sample:
    return sample(i, {"fc": {"grad_norm": grad, "weight_norm": weight, "update_ratio": ratio}}, loss=loss)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_an_update_after_which_the_loss_rises_by_what_it_was_to_fall_is_a_warning(scale: float) -> None:
    stream = [step(0, 2.0, grad=scale, loss=scale), sample(1, loss=20 * scale)]
    (event,) = costly(events(Rule(), stream))
    assert (event.to_state, event.severity, event.step, event.last_step) == ("overshooting", Severity.WARNING, 0, 1)
    assert {m.name: m.value for m in event.evidence} == {
        "update_ratio": pytest.approx(2.0),
        "predicted_relative_loss_change": pytest.approx(10.0),
        "loss_rise": pytest.approx(19 * scale),
    }


def test_a_loss_that_is_no_longer_finite_proves_the_update_wrong() -> None:
    (event,) = costly(events(Rule(), [step(0, 2.0), sample(1, loss=math.inf)]))
    assert (event.step, event.evidence[-1].num_non_finite) == (0, 1)


@pytest.mark.parametrize("losses", [[0.9, 0.8, 0.7], [1.5, 3.0, 9.0], [1.0, 1.0, 1.0, 1.0, 50.0]])
def test_a_long_update_that_did_no_such_harm_is_info(losses: list[float]) -> None:
    stream = [step(0, 2.0), *(sample(i, loss=loss) for i, loss in enumerate(losses, start=1))]
    assert costly(events(Rule(), stream)) == []


def test_a_large_part_of_small_weights_is_info() -> None:
    (event,) = events(Rule(), [step(i, 0.5, weight=0.01) for i in range(5)])
    assert (event.to_state, event.severity) == ("large", Severity.INFO)


def test_usual_updates_are_not_reported() -> None:
    assert events(Rule(), [step(i, 1e-2) for i in range(50)]) == []


def test_a_loss_near_zero_does_not_make_an_update_overshoot() -> None:
    fitted = [step(i, 0.01, loss=2.0 * 0.5**i) for i in range(40)]
    assert costly(events(Rule(), [*fitted, step(40, 0.2, grad=0.01, loss=1e-9), sample(41, loss=0.02)])) == []


def test_a_run_of_overshooting_steps_is_told_once() -> None:
    stream = [step(i, 2.0, grad=20.0**i, loss=20.0**i) for i in range(20)]
    assert announcements(Rule(), stream) == [(0, Severity.INFO), (1, Severity.WARNING)]
