from __future__ import annotations

import pytest

from gradtracer.diagnosis import diagnose
from tests.causes.fabricate import INF, calm, event, fixes, sample, series
from tests.detectors.streams import model

CODE = "exploding_gradient"
MODEL = model(("rnn", "RNN"), ("head", "Linear"))
LAYERS = {"rnn": {"grad_norm": 200.0, "update_ratio": 1.0}, "head": {"grad_norm": 10.0, "update_ratio": 0.5}}


def test_at_the_start_the_gradient_is_clipped_to_a_norm_that_moves_the_weights_by_a_hundredth() -> None:
    steps = [sample(0, LAYERS, loss=1.7, grad_norm=200.2, learning_rate=0.03)]
    steps += [sample(i, loss=INF, grad_norm=INF, learning_rate=0.03) for i in range(1, 20)]
    run = series(
        steps,
        event(CODE, 0, layer="rnn", elasticity=600.0),
        event("update_ratio_too_high", 0, update_ratio=1.0),
        event("non_finite", 1, state="non_finite_forward"),
        observations=[MODEL],
    )
    first, second, *_ = diagnose(run)
    assert (first.code, first.layer, first.onset_step) == (CODE, "rnn", 0)
    assert second.code == "learning_rate_too_high"
    assert fixes(first) == [
        ("clip_grad_norm", {"max_norm": pytest.approx(2.0)}),
        ("adaptive_grad_clip", {"clipping": 0.01}),
        ("set_learning_rate", {"learning_rate": 0.003}),
    ]


def test_in_a_run_it_is_rolled_back_and_clipped_at_its_usual_norm() -> None:
    run = series(
        calm(50) + calm(30, loss=1e5, falling=False, first=50),
        event(CODE, 49, severity="critical", grad_norm=5e3),
        observations=[MODEL],
    )
    first, *_ = diagnose(run)
    assert fixes(first)[0] == ("clip_grad_norm", {"max_norm": 1.0})
    assert all(f.rollback_first for f in first.fixes)


def test_of_several_layers_the_most_sensitive_is_the_root() -> None:
    run = series(
        calm(40),
        event(CODE, 5, layer="head", elasticity=150.0, number=1),
        event(CODE, 5, layer="rnn", elasticity=900.0, number=2),
        observations=[MODEL],
    )
    first, *_ = diagnose(run)
    assert (first.layer, first.affected_layers) == ("rnn", ("rnn", "head"))


def test_a_gradient_that_grew_after_an_update_had_overshot_is_a_consequence() -> None:
    run = series(
        calm(40),
        event("update_ratio_too_high", 1, update_ratio=2.0),
        event("divergence", 2),
        event(CODE, 3, layer="head", elasticity=300.0),
        observations=[MODEL],
    )
    assert diagnose(run)[0].code == "learning_rate_too_high"
