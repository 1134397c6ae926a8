from __future__ import annotations

import math

from gradtracer.detectors import DETECTORS
from gradtracer.records import Severity
from tests.detectors.streams import costly, events, sample

Rule = DETECTORS["gradient_health"]


def run(norms: list[float]) -> list[tuple[str, str, int, int]]:
    stream = [sample(i, {"fc": {"grad_norm": n}}) for i, n in enumerate(norms)]
    return [(e.from_state, e.to_state, e.step, e.last_step) for e in events(Rule(), stream)]


def test_each_state_is_one_info_event_with_the_state_before() -> None:
    norms = [0.1] * 3 + [5.0] * 4 + [5e3] * 4 + [0.1] * 4 + [1e-8] * 5
    assert run(norms) == [
        ("healthy", "saturated", 3, 6),
        ("saturated", "exploding", 7, 10),
        ("healthy", "vanishing", 15, 19),
    ]


def test_a_state_alone_is_never_a_warning() -> None:
    stream = [sample(i, {"fc": {"grad_norm": 1e9}, "out": {"grad_norm": 1e-12}}) for i in range(50)]
    found = events(Rule(), stream)
    assert {e.severity for e in found} == {Severity.INFO}
    assert costly(found) == []


def test_noise_around_a_bound_is_no_transition() -> None:
    assert run([0.8, 1.3] * 20) == []
    assert run([3.0] * 3 + [0.8, 1.3] * 20) == [("healthy", "saturated", 0, 42)]


def test_a_boundary_belongs_to_the_milder_state() -> None:
    assert run([1.0] * 5) == []
    assert run([2.0**-19] * 5) == []  # the float32 nearest to 1e-6 is below it
    assert run([1e3] * 5) == [("healthy", "saturated", 0, 4)]


def test_a_norm_that_is_not_finite_is_a_state_without_a_number() -> None:
    stream = [sample(i, {"fc": {"grad_norm": math.inf}}) for i in range(4)]
    (event,) = events(Rule(), stream)
    assert (event.to_state, event.evidence[0].value, event.evidence[0].num_non_finite) == ("non_finite", None, 1)


def test_a_layer_that_never_had_a_gradient_has_no_state() -> None:
    assert run([0.0] * 10) == []


def test_unsampled_steps_say_nothing() -> None:
    assert Rule().assess(sample(3, grad_norm=1e9)) is None
