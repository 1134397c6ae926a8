from __future__ import annotations

import pytest

from gradtracer.detectors import DETECTORS
from gradtracer.records import Severity
from gradtracer.samples import Sample
from tests.detectors.streams import announcements, events, noisy_losses, sample

Rule = DETECTORS["divergence"]


def diverging(scale: float = 1.0) -> list[Sample]:
    return [
        sample(
            i,
            {"fc": {"grad_norm": 5.0 * 30**i * scale, "weight_norm": 2.0, "update_ratio": 2.0}},
            loss=0.5 * 30**i * scale,
            grad_norm=5.0 * 30**i * scale,
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e5])
def test_a_loss_that_runs_away_under_large_updates_is_reported_and_becomes_critical(scale: float) -> None:
    stream = diverging(scale)
    (event,) = events(Rule(), stream)
    assert (event.step, event.last_step, event.severity) == (1, 5, Severity.CRITICAL)
    assert announcements(Rule(), stream) == [(3, Severity.CRITICAL)]


def test_the_same_rise_under_small_updates_is_not_reported() -> None:
    stream = [
        sample(i, {"fc": {"grad_norm": 0.1, "weight_norm": 2.0, "update_ratio": 1e-4}}, loss=0.5 * 30**i, grad_norm=0.1)
        for i in range(6)
    ]
    assert events(Rule(), stream) == []


def test_a_jump_to_a_thousandth_of_what_was_gained_costs_nothing() -> None:
    losses = noisy_losses(60, first=2.0, last=1e-6) + [1e-6] * 40 + [2e-3] * 5 + [1e-6] * 20
    stream = [
        sample(i, {"fc": {"grad_norm": 1.0, "weight_norm": 2.0, "update_ratio": 0.5}}, loss=loss, grad_norm=1.0)
        for i, loss in enumerate(losses)
    ]
    assert events(Rule(), stream) == []


def test_a_negative_loss_that_falls_does_not_diverge() -> None:
    stream = [
        sample(i, {"fc": {"grad_norm": 9.0, "weight_norm": 2.0, "update_ratio": 0.5}}, loss=-0.1 * 3**i, grad_norm=9.0)
        for i in range(10)
    ]
    assert events(Rule(), stream) == []
