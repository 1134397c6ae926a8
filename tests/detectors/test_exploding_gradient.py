from __future__ import annotations

import math

import pytest

from gradtracer.detectors import DETECTORS
from gradtracer.records import Severity
from gradtracer.samples import Sample
from tests.detectors.streams import announcements, events, model, noisy_losses, sample

Rule = DETECTORS["exploding_gradient"]


def layer(step: int, grad: float, *, weight: float = 5.0, ratio: float = 1e-3, loss: float = 1.0) -> Sample:
    numbers = {"grad_norm": grad, "weight_norm": weight, "update_ratio": ratio}
    return sample(step, {"rnn": numbers}, loss=loss, grad_norm=grad)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_gradient_out_of_proportion_that_moves_the_weights_too_far_is_told_by_the_next_loss(scale: float) -> None:
    stream = [layer(0, 200 * scale, ratio=1.0, loss=1.7 * scale), sample(1, loss=1e9 * scale)]
    (event,) = events(Rule(), stream)
    assert (event.layer, event.step, event.last_step, event.severity) == ("rnn", 0, 1, Severity.WARNING)
    assert event.evidence[0].value == pytest.approx(200 * 5 / 1.7, rel=1e-5)


def test_a_gradient_that_looks_out_of_proportion_because_the_loss_is_near_zero_does_no_harm() -> None:
    assert events(Rule(), [layer(0, 1.0, ratio=0.1, loss=0.003), *(sample(i, loss=0.2) for i in range(1, 9))]) == []


def test_large_gradients_in_proportion_to_a_large_loss_are_healthy() -> None:
    stream = [layer(i, 5e6, ratio=0.02, loss=1e7) for i in range(30)]
    assert events(Rule(), stream) == []


def test_a_hypersensitive_layer_whose_updates_stay_small_is_reported_only_while_its_norm_is_large_too() -> None:
    small = [layer(i, 50.0, loss=1.0) for i in range(10)]
    large = [layer(i, 5e4, loss=1e3) for i in range(20)]
    assert events(Rule(), small) == []
    assert [(e.layer, e.step) for e in events(Rule(), large)] == [("rnn", 0)]
    assert announcements(Rule(), large) == [(10, Severity.WARNING)]


def test_an_embedding_whose_weights_are_mostly_untouched_is_left_out() -> None:
    description = model(("rnn", "Embedding"), ("head", "Linear"))
    assert events(Rule(), [description, *(layer(i, 5e4, weight=500, loss=1e3) for i in range(10))]) == []


def losses_with_jump(sustained: bool) -> list[float]:
    losses = noisy_losses(60)
    return losses + [30.0 + 0.1 * i for i in range(10)] if sustained else [*losses, 30.0, *noisy_losses(20, first=0.4)]


def test_a_hundredfold_gradient_is_reported_when_the_loss_rises_and_stays_up() -> None:
    stream = [
        sample(i, loss=loss, grad_norm=500.0 if i == 60 else 1.0 + 0.1 * (i % 5))
        for i, loss in enumerate(losses_with_jump(sustained=True))
    ]
    (event,) = events(Rule(), stream)
    assert (event.layer, event.severity) == (None, Severity.WARNING)
    assert event.step == 60
    assert event.evidence[0].baseline == pytest.approx(1.2, rel=0.1)


def test_a_hundredfold_gradient_of_one_odd_batch_is_forgotten() -> None:
    stream = [
        sample(i, loss=loss, grad_norm=500.0 if i == 60 else 1.0)
        for i, loss in enumerate(losses_with_jump(sustained=False))
    ]
    assert events(Rule(), stream) == []


def test_numbers_that_are_not_finite_after_a_jump_make_it_critical() -> None:
    stream = [sample(i, loss=1.0, grad_norm=1.0) for i in range(30)]
    stream += [sample(30, loss=1.0, grad_norm=1e5), sample(31, loss=math.inf, grad_norm=math.inf)]
    (event,) = events(Rule(), stream)
    assert (event.step, event.last_step, event.severity) == (30, 31, Severity.CRITICAL)
