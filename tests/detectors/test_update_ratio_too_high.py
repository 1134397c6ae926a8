from __future__ import annotations

import pytest

from gradtracer.detectors import DETECTORS
from gradtracer.records import Severity
from gradtracer.samples import Sample
from tests.detectors.streams import announcements, events, sample

Rule = DETECTORS["update_ratio_too_high"]


def step(i: int, ratio: float, *, grad: float = 1.0, weight: float = 5.0, loss: float = 1.0) -> Sample:
    return sample(i, {"fc": {"grad_norm": grad, "weight_norm": weight, "update_ratio": ratio}}, loss=loss)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_an_update_beyond_what_the_gradient_can_vouch_for_is_a_warning(scale: float) -> None:
    (event,) = events(Rule(), [step(0, 2.0, grad=scale, loss=scale)])
    assert (event.to_state, event.severity, event.step) == ("overshooting", Severity.WARNING, 0)
    assert [m.value for m in event.evidence] == [pytest.approx(2.0), pytest.approx(10.0)]


def test_a_large_part_of_small_weights_is_info() -> None:
    (event,) = events(Rule(), [step(i, 0.5, weight=0.01) for i in range(5)])
    assert (event.to_state, event.severity) == ("large", Severity.INFO)


def test_usual_updates_are_not_reported() -> None:
    assert events(Rule(), [step(i, 1e-2) for i in range(50)]) == []


def test_a_loss_near_zero_does_not_make_an_update_overshoot() -> None:
    fitted = [step(i, 0.01, loss=2.0 * 0.5**i) for i in range(40)]
    assert events(Rule(), [*fitted, step(40, 0.2, grad=0.01, loss=1e-9)])[-1].severity is Severity.INFO


def test_a_run_of_overshooting_steps_is_told_once() -> None:
    assert announcements(Rule(), [step(i, 2.0) for i in range(100)]) == [(0, Severity.WARNING)]
