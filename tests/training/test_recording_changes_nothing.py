"""Training with a tracker is bit for bit training without one."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
import torch.optim.optimizer as optimizer_hooks
from torch import nn

from gradtracer import FlowTracker
from tests.families import family
from tests.training.models import MODELS

STEPS = 60


def _outcome(name: str, how: str, interval: int) -> tuple[list[float], list[torch.Tensor], object]:
    random.seed(1)
    np.random.seed(1)
    training = MODELS[name]()
    if how == "untracked":
        losses = training.run(STEPS)
    elif how == "marked":
        tracker = FlowTracker(training.model, training.optimizer, track_interval=interval)
        losses = training.run(STEPS, lambda loss: tracker.step(loss=loss.item()))
        tracker.close()
    else:
        with FlowTracker(training.model, track_interval=interval):
            losses = training.run(STEPS)
    state = [t.clone() for t in training.model.state_dict().values()]
    numpy_state = np.random.get_state(legacy=True)
    return losses, state, (torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2])


@pytest.mark.parametrize("interval", [1, 100])
@pytest.mark.parametrize("how", ["marked", "untouched loop"])
@pytest.mark.parametrize("name", family(MODELS, "mlp"))
def test_losses_weights_and_random_states_are_equal_with_and_without_the_tracker(
    name: str, how: str, interval: int
) -> None:
    plain, tracked = _outcome(name, "untracked", interval), _outcome(name, how, interval)
    assert tracked[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(tracked[1], plain[1], strict=True))
    assert tracked[2] == plain[2]


def test_closing_leaves_torch_the_model_and_the_optimizer_as_they_were() -> None:
    before = (
        torch.autograd.backward,
        torch.amp.GradScaler.scale,
        dict(optimizer_hooks._global_optimizer_pre_hooks),
        dict(optimizer_hooks._global_optimizer_post_hooks),
        dict(nn.modules.module._global_forward_hooks),
        dict(nn.modules.module._global_forward_hooks_with_kwargs),
    )
    training = MODELS["mlp"]()
    with FlowTracker(training.model, training.optimizer, track_interval=1):
        training.run(3)
        assert torch.autograd.backward is not before[0]
    after = (
        torch.autograd.backward,
        torch.amp.GradScaler.scale,
        dict(optimizer_hooks._global_optimizer_pre_hooks),
        dict(optimizer_hooks._global_optimizer_post_hooks),
        dict(nn.modules.module._global_forward_hooks),
        dict(nn.modules.module._global_forward_hooks_with_kwargs),
    )
    assert after == before
    assert not any(m._forward_hooks or m._backward_hooks or m._forward_pre_hooks for m in training.model.modules())
    assert not training.optimizer._optimizer_step_pre_hooks


def test_the_hooks_stay_while_another_tracker_is_open() -> None:
    first, second = MODELS["mlp"](), MODELS["cnn"]()
    one, two = FlowTracker(first.model), FlowTracker(second.model)
    one.close()
    second.run(5)
    two.close()
    assert two._capture.last_step == 4
    assert one._capture.last_step == -1


def test_copies_and_pickles_of_a_tracked_model_carry_nothing_of_ours() -> None:
    training = MODELS["mlp"]()
    with FlowTracker(training.model, training.optimizer) as tracker:
        training.run(2)
        average = copy.deepcopy(training.model)
        assert b"gradtracer" not in pickle.dumps(training.model)
        average(torch.randn(4, 12)).sum().backward()
        training.run(2)
    assert tracker._capture.last_step == 3


def test_an_error_of_the_tracker_itself_turns_it_off_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = MODELS["mlp"]()
    plain = MODELS["mlp"]().run(20)
    training = MODELS["mlp"]()
    tracker = FlowTracker(training.model, training.optimizer)
    first = training.run(10, lambda loss: tracker.step(loss.item()))

    def broken(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(tracker._capture, "_read_gradients", broken)
    rest = training.run(10, lambda loss: tracker.step(loss.item()))
    tracker.close()
    assert first + rest == plain
    assert len([r for r in caplog.records if "error of its own" in r.getMessage()]) == 1
    assert "a bug of ours" in caplog.text
    caplog.clear()
