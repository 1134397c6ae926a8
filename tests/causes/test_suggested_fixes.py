"""What a diagnosis suggests can be applied as it stands, and fits what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtracer import FlowTracker
from gradtracer.fixes import get_fix
from gradtracer.records import CausalHypothesis
from tests.causes.fabricate import fixes
from tests.training.loops import FAULTY

pytestmark = pytest.mark.slow

EXPECTED = {
    "never_cleared_adam": ("clear_gradients", {}),
    "accumulated_sum_diverges": ("scale_gradients", {"factor": 0.042}),
    "cleared_every_eighth": ("clear_gradients", {}),
    "adam_rebuilt_at_137": ("warmup", {"steps": 100}),
    "half_adam": ("set_epsilon", {"epsilon": 1e-4}),
    "multiplied_by_a_thousand": ("scale_gradients", {"factor": 0.001}),
    "decay_sgd": ("set_weight_decay", {"weight_decay": 1e-4}),
    "decay_adamw": ("set_weight_decay", {"weight_decay": 1e-2}),
    "exponential_schedule": ("set_learning_rate", {"learning_rate": 0.05}),
    "post_norm_without_warm_up": ("warmup", {"steps": 200}),
}


def _diagnosed(name: str, home: Path) -> CausalHypothesis:
    loop = FAULTY[name][0]()
    with FlowTracker(loop.model, home=home, serve=False) as tracker:
        for i in range(loop.num_steps):
            tracker.step(loop.step(i))
    return next(h for h in tracker.explain_failure() if h.code == FAULTY[name][1])


@pytest.mark.parametrize("name", EXPECTED)
def test_the_first_suggestion_mends_the_fault_that_was_built_in(name: str, tmp_path: Path) -> None:
    found = _diagnosed(name, tmp_path)
    code, parameters = EXPECTED[name]
    first, *_ = fixes(found)
    assert first[0] == code
    assert first[1] == pytest.approx(parameters)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_suggestion_is_within_the_bounds_of_its_fix_which_claims_the_cause(name: str, tmp_path: Path) -> None:
    found = _diagnosed(name, tmp_path)
    assert found.fixes
    for code, parameters in fixes(found):
        fix = get_fix(code)
        fix.parse(parameters)
        assert found.code in fix.mends
