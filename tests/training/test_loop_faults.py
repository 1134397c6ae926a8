"""Faults in how a training loop is put together, in runs other than the corpus, and their healthy relatives."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gradtracer import FlowTracker
from gradtracer.records import CausalHypothesis, SemanticEvent, Severity
from tests.training.loops import FAULTY, HEALTHY, Loop, classify, mlp, sgd

pytestmark = pytest.mark.slow


def watched(loop: Loop, home: Path) -> tuple[list[SemanticEvent], list[CausalHypothesis]]:
    with FlowTracker(loop.model, serve=False, home=home) as tracker:
        for i in range(loop.num_steps):
            tracker.step(loss=loop.step(i))
    costly = [e for e in tracker.events if e.severity is not Severity.INFO]
    return costly, tracker.explain_failure()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_of_the_loop_is_named_with_its_layer_and_its_step(name: str, tmp_path: Path) -> None:
    build, cause, layer, step = FAULTY[name]
    events, (first, *_) = watched(build(), tmp_path)
    assert events
    assert first.code == cause
    assert layer is None or first.layer == layer
    assert first.onset_step is not None
    assert abs(first.onset_step - step) <= 1
    assert first.advice


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEALTHY)
def test_a_loop_that_looks_odd_and_is_healthy_raises_no_warning(name: str, tmp_path: Path) -> None:
    events, (first, *_) = watched(HEALTHY[name](), tmp_path)
    assert events == []
    assert first.code == "healthy"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*FAULTY, *HEALTHY])
def test_watching_a_loop_leaves_its_losses_and_the_random_state_to_the_bit(name: str, tmp_path: Path) -> None:
    build = FAULTY[name][0] if name in FAULTY else HEALTHY[name]
    steps = 40

    def losses(loop: Loop, tracker: FlowTracker | None) -> list[float]:
        found = []
        for i in range(steps):
            found.append(loop.step(i))
            if tracker is not None:
                tracker.step(loss=found[-1])
        return found

    plain = losses(build(), None)
    state = torch.get_rng_state()
    loop = build()
    with FlowTracker(loop.model, serve=False, home=tmp_path) as tracker:
        seen = losses(loop, tracker)
    assert [x for x in seen if not math.isnan(x)] == [x for x in plain if not math.isnan(x)]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cleared_gradient_is_seen_in_a_loop_that_does_not_mark_its_steps(tmp_path: Path) -> None:
    model = mlp(12, 24, 4)
    loop = classify(model, sgd(model), zero=lambda i: False)
    with FlowTracker(model, serve=False, home=tmp_path) as tracker:
        for i in range(30):
            loop.step(i)
    first, *_ = tracker.explain_failure()
    assert (first.code, first.onset_step) == ("zero_grad_missing", 1)
    assert first.source is not None
    assert first.source.file == __file__.replace("test_loop_faults", "loops")
