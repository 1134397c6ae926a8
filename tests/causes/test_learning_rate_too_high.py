from __future__ import annotations

from gradtracer.diagnosis import diagnose
from gradtracer.records import NonFiniteOrigin, OptimizerDescription
from tests.causes.fabricate import INF, calm, event, fixes, sample, series

CODE = "learning_rate_too_high"


def overshoot(step: int, ratio: float = 2.0):
    return event("update_ratio_too_high", step, update_ratio=ratio)


def test_a_rate_that_is_too_high_from_the_start_is_lowered_so_that_updates_come_to_a_hundredth() -> None:
    run = series(calm(3) + calm(20, loss=1e6, falling=False, first=3), overshoot(0), event("divergence", 2))
    first, *_ = diagnose(run)
    assert (first.code, first.layer, first.onset_step) == (CODE, None, 0)
    assert first.probability > 0.9
    assert fixes(first) == [("set_learning_rate", {"learning_rate": r}) for r in (0.0005, 5e-5, 0.005)]
    assert all(f.rollback_first for f in first.fixes)
    assert first.causal_chain == ("e0-update_ratio_too_high", "e2-divergence")


def test_after_a_jump_the_run_is_rolled_back_and_the_rate_before_it_is_restored() -> None:
    damaged = calm(30, rate=30.0, loss=1e6, falling=False, first=50)
    run = series(calm(50) + damaged, overshoot(50), event("divergence", 51))
    first, *_ = diagnose(run)
    assert (first.code, first.onset_step) == (CODE, 50)
    assert fixes(first) == [("set_learning_rate", {"learning_rate": r}) for r in (0.1, 0.033, 0.01)]
    assert all(f.rollback_first for f in first.fixes)
    assert any("from 0.1 to 30" in e.statement for e in first.evidence_for)


def test_weights_that_are_not_damaged_need_no_rollback() -> None:
    run = series(calm(50) + calm(30, rate=30.0, first=50), overshoot(50))
    first, *_ = diagnose(run)
    assert fixes(first)[0] == ("set_learning_rate", {"learning_rate": 0.1})
    assert not any(f.rollback_first for f in first.fixes)


def test_under_plain_gradients_the_rate_is_lowered_to_a_quarter_of_what_is_stable() -> None:
    sgd = OptimizerDescription(step=0, type="SGD", groups=(), missing=(), num_foreign=0)
    thrown = event("update_ratio_too_high", 0, update_ratio=4.0, predicted_relative_loss_change=50.0)
    run = series(calm(3, rate=3.0) + calm(20, rate=3.0, loss=1e6, falling=False, first=3), thrown, observations=[sgd])
    assert fixes(diagnose(run)[0]) == [("set_learning_rate", {"learning_rate": r}) for r in (0.06, 0.0075)]


def test_a_restart_to_a_rate_that_the_run_has_trained_at_is_no_jump() -> None:
    steps = calm(20, rate=0.8) + calm(30, rate=0.001, first=20) + calm(30, rate=0.8, first=50)
    (hypothesis,) = [h for h in diagnose(series(steps, overshoot(52))) if h.code == CODE]
    assert not any("rose from" in e.statement for e in hypothesis.evidence_for)


def test_a_gradient_that_exploded_first_speaks_against_it() -> None:
    exploded = event("exploding_gradient", 0, layer="rnn", elasticity=600.0)
    run = series(
        calm(1) + [sample(i, loss=INF, grad_norm=INF, learning_rate=0.1) for i in range(1, 9)], overshoot(0), exploded
    )
    ranked = [h.code for h in diagnose(run)]
    assert ranked.index("exploding_gradient") < ranked.index(CODE)


def test_a_batch_that_was_not_finite_speaks_against_it() -> None:
    origin = NonFiniteOrigin(step=40, where="data", num_non_finite=3)
    run = series(calm(60), event("non_finite", 40, state="non_finite_data"), overshoot(41), observations=[origin])
    assert diagnose(run)[0].code == "nan_in_data"


def test_a_run_without_symptoms_is_not_charged() -> None:
    assert CODE not in [h.code for h in diagnose(series(calm(100)))]
