from __future__ import annotations

import random

import pytest

from gradtracer.detectors import DETECTORS
from gradtracer.records import Severity
from gradtracer.samples import Sample
from tests.detectors.streams import costly, events, noisy_losses, sample

Rule = DETECTORS["loss_spike"]


def run(losses: list[float], *, norms: dict[int, float] | None = None, rates: dict[int, float] | None = None):
    rate, stream = 0.1, list[Sample]()
    for i, loss in enumerate(losses):
        rate = (rates or {}).get(i, rate)
        stream.append(sample(i, loss=loss, grad_norm=(norms or {}).get(i, 1.0), learning_rate=rate))
    return events(Rule(), stream)


SHIFTED = noisy_losses(100) + [3.0 + 0.05 * (i % 3) for i in range(40)]


@pytest.mark.parametrize("cause", [{"norms": {100: 50.0}}, {"rates": {99: 10.0}}])
def test_a_loss_that_jumps_and_stays_up_is_one_warning(cause: dict) -> None:
    (event,) = costly(run(SHIFTED, **cause))
    assert (event.to_state, event.severity) == ("shifted", Severity.WARNING)
    assert (event.step, event.last_step) == (100, 139)


@pytest.mark.parametrize("offset", [-10.0, 1000.0])
def test_sign_and_offset_of_the_loss_do_not_matter(offset: float) -> None:
    assert len(costly(run([loss + offset for loss in SHIFTED], norms={100: 50.0}))) == 1


def test_without_a_jump_of_gradient_or_rate_a_shift_may_be_the_data() -> None:
    assert costly(run(SHIFTED)) == []


def test_a_single_odd_loss_is_info() -> None:
    losses = noisy_losses(100)
    losses[80] = 25.0
    found = run(losses, norms={80: 50.0})
    assert [(e.to_state, e.step, e.severity) for e in found] == [("spike", 80, Severity.INFO)]


def test_a_small_step_back_as_after_a_warm_restart_is_no_warning() -> None:
    losses = noisy_losses(100, last=0.1) + [0.4 + 0.02 * (i % 5) for i in range(30)]
    assert costly(run(losses, rates={99: 10.0})) == []


def test_a_loss_that_climbs_smoothly_is_no_warning() -> None:
    losses = [0.7 + 0.02 * i for i in range(300)]
    assert costly(run(losses, norms={i: 20.0 for i in range(0, 300, 40)})) == []


@pytest.mark.parametrize("seed", range(5))
def test_heavy_tailed_losses_of_small_batches_are_no_warning(seed: int) -> None:
    rng = random.Random(seed)
    losses = [rng.lognormvariate(-4.0, 3.0) for _ in range(3000)]
    assert costly(run(losses, norms={i: 100 * loss for i, loss in enumerate(losses)})) == []
