from __future__ import annotations

import random

from gradtracer.detectors import DETECTORS
from gradtracer.records import Severity
from tests.detectors.streams import events, noisy_losses, sample

Rule = DETECTORS["plateau"]


def test_a_loss_that_no_longer_falls_is_info() -> None:
    rng = random.Random(0)
    stream = [sample(i, loss=2.3 + rng.gauss(0, 0.1)) for i in range(200)]
    (event,) = events(Rule(), stream)
    assert (event.from_state, event.to_state, event.severity) == ("improving", "plateau", Severity.INFO)
    assert event.step == 63


def test_a_loss_that_falls_is_no_plateau() -> None:
    losses = [2.3 * 0.99**i for i in range(300)]
    assert events(Rule(), [sample(i, loss=loss) for i, loss in enumerate(losses)]) == []


def test_the_episode_ends_when_the_loss_drops() -> None:
    rng = random.Random(1)
    losses = [0.7 + rng.gauss(0, 0.01) for _ in range(160)] + noisy_losses(160, first=0.7, last=0.01)
    (event, *_) = events(Rule(), [sample(i, loss=loss) for i, loss in enumerate(losses)])
    assert not event.open
    assert 144 <= event.last_step < 200
