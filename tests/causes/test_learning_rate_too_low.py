from __future__ import annotations

import pytest

from gradtracer.diagnosis import diagnose
from tests.causes.fabricate import calm, event, fixes, series

CODE = "learning_rate_too_low"
LAYERS = {"a": {"update_ratio": 2e-7, "grad_norm": 1.0}, "b": {"update_ratio": 1e-7, "grad_norm": 1.0}}


def test_the_rate_is_raised_so_that_the_largest_update_comes_to_a_hundredth_or_a_thousandth() -> None:
    run = series(
        calm(80, rate=1e-6, falling=False, layers=LAYERS), event("update_ratio_too_low", 50, update_ratio=2e-7)
    )
    first, *_ = diagnose(run)
    assert (first.code, first.layer, first.onset_step) == (CODE, None, 0)
    assert first.probability > 0.9
    assert fixes(first) == [("set_learning_rate", {"learning_rate": pytest.approx(r)}) for r in (0.05, 0.005)]


def test_the_rate_is_never_raised_above_one() -> None:
    run = series(
        calm(80, rate=0.01, falling=False, layers=LAYERS), event("update_ratio_too_low", 50, update_ratio=1e-8)
    )
    assert fixes(diagnose(run)[0]) == [("set_learning_rate", {"learning_rate": 1.0})]  # once


def test_a_gradient_that_fades_explains_still_layers_better() -> None:
    run = series(
        calm(80, rate=1e-3, falling=False, layers=LAYERS),
        event("update_ratio_too_low", 50, update_ratio=2e-7),
        event("vanishing_gradient", 0, layer="a"),
    )
    assert diagnose(run)[0].code == "vanishing_gradient"
