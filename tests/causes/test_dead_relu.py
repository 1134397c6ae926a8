from __future__ import annotations

from gradtracer.diagnosis import diagnose
from tests.causes.fabricate import calm, event, fixes, series
from tests.detectors.streams import model

CODE = "dead_relu"
MODEL = model(("fc1", "Linear"), ("a1", "ReLU", "fc1"), ("fc2", "Linear"), ("a2", "ReLU", "fc2"), ("out", "Linear"))


def test_units_that_died_mid_run_are_revived_or_gone_on_from_before() -> None:
    run = series(calm(80), event("dead_units", 50, layer="fc2", state="dead"), observations=[MODEL])
    first, *_ = diagnose(run)
    assert (first.code, first.layer, first.onset_step) == (CODE, "fc2", 50)
    assert fixes(first) == [
        ("revive_dead_units", {"layers": "fc2"}),
        ("reinitialize_layer", {"layers": "fc2"}),
        ("set_learning_rate", {"learning_rate": 0.1}),
        ("reinitialize_layer", {}),
        ("leaky_slope", {"slope": 0.01}),
    ]
    assert [f.rollback_first for f in first.fixes] == [False, False, True, False, False]


def test_a_layer_without_any_gradient_is_further_evidence() -> None:
    cut = {"fc1": {"grad_norm": 0.0, "update_ratio": 0.0}, "out": {"grad_norm": 1.0, "update_ratio": 1e-3}}
    dead = event("dead_units", 0, layer="fc1", state="dead")
    with_gradient = diagnose(series(calm(80), dead, observations=[MODEL]))[0]
    without = diagnose(series(calm(80, layers=cut), dead, observations=[MODEL]))[0]
    assert any("exactly zero" in e.statement for e in without.evidence_for)
    assert without.probability > with_gradient.probability


def test_of_layers_that_died_in_the_same_upset_the_one_nearest_to_the_input_is_the_root() -> None:
    run = series(
        calm(80),
        event("dead_units", 35, layer="fc2", state="dying"),
        event("dead_units", 36, layer="fc1", state="dying"),
        observations=[MODEL],
    )
    first, *_ = diagnose(run)
    assert (first.layer, first.affected_layers) == ("fc1", ("fc1", "fc2"))


def test_after_a_slip_of_the_rate_that_is_over_the_dead_units_are_what_fails() -> None:
    steps = calm(30, rate=2e-3) + calm(3, rate=1.0, first=30) + calm(60, rate=2e-3, first=33)
    run = series(
        steps,
        event("update_ratio_too_high", 30, last_step=32, update_ratio=5.0),
        event("divergence", 31),
        event("dead_units", 35, layer="fc1", state="dying"),
        observations=[MODEL],
    )
    first, second, *_ = diagnose(run)
    assert (first.code, first.onset_step, second.code) == (CODE, 30, "learning_rate_too_high")


def test_while_the_rate_is_still_too_high_it_is_the_cause_and_the_dead_units_its_consequence() -> None:
    run = series(
        calm(30, rate=2e-3) + calm(60, rate=1.0, first=30),
        event("update_ratio_too_high", 30, update_ratio=5.0),
        event("divergence", 31),
        event("dead_units", 35, layer="fc1", state="dead"),
        observations=[MODEL],
    )
    assert diagnose(run)[0].code == "learning_rate_too_high"
