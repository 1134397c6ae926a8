from __future__ import annotations

import random

from gradtracer.detectors import DETECTORS
from gradtracer.samples import Sample
from tests.detectors.streams import events, sample

Rule = DETECTORS["update_ratio_too_low"]


def run(
    ratio: float, losses: list[float], *, norms: list[float] | None = None, rates: list[float] | None = None
) -> list[int]:
    stream: list[Sample] = []
    for i, loss in enumerate(losses):
        layers = {n: {"update_ratio": ratio * f} for n, f in (("a", 1.0), ("b", 0.3))} if i % 10 == 0 else None
        stream.append(
            sample(
                i,
                layers,
                loss=loss,
                grad_norm=norms[i] if norms else 1.0,
                learning_rate=rates[i] if rates else 1e-6,
            )
        )
    return [event.step for event in events(Rule(), stream)]


def flat(num: int = 120) -> list[float]:
    rng = random.Random(0)
    return [2.3 + rng.gauss(0, 0.1) for _ in range(num)]


def test_a_run_in_which_nothing_moves_is_reported_after_fifty_steps() -> None:
    assert run(2e-7, flat()) == [50]


def test_usual_updates_are_not_reported() -> None:
    assert run(1e-3, flat()) == []


def test_a_loss_that_falls_all_the_same_is_not_reported() -> None:
    assert run(2e-7, [2.3 * 0.99**i for i in range(120)]) == []


def test_a_warm_up_is_not_reported() -> None:
    assert run(2e-7, flat(), rates=[1e-8 * (i + 1) for i in range(120)]) == []


def test_a_run_that_has_lost_its_gradient_by_converging_is_not_reported() -> None:
    assert run(2e-7, flat(), norms=[0.9**i for i in range(120)]) == []


def test_the_end_of_a_schedule_is_not_reported() -> None:
    moved = sample(0, {"a": {"update_ratio": 1e-2}}, loss=2.0, grad_norm=1.0, learning_rate=0.1)
    still = [
        sample(i, {"a": {"update_ratio": 1e-9}}, loss=0.5, grad_norm=1.0, learning_rate=1e-9) for i in range(1, 200)
    ]
    assert events(Rule(), [moved, *still]) == []
