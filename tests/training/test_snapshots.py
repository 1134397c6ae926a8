"""A snapshot puts everything back, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gradtracer.errors import BadParameter
from gradtracer.training.snapshots import SnapshotStore
from gradtracer.training.state import TrainingState
from tests.training.models import MODELS, Training, mlp


def _everything(training: Training) -> tuple[object, ...]:
    optimizer = training.optimizer.state_dict()
    return (
        [t.tolist() for t in training.model.state_dict().values()],
        [[v.tolist() if isinstance(v, torch.Tensor) else v for v in s.values()] for s in optimizer["state"].values()],
        optimizer["param_groups"],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state(legacy=True)[1].tolist(),
    )


@pytest.mark.parametrize("name", MODELS)
def test_rolled_back_training_repeats_itself_bit_for_bit(name: str, tmp_path: Path) -> None:
    training = MODELS[name]()
    store = SnapshotStore(tmp_path, TrainingState(training.model, [training.optimizer]))
    training.run(7)
    before = _everything(training)
    taken = store.take(6, healthy=True)
    assert taken is not None
    first = training.run(10)
    assert _everything(training) != before
    assert store.restore(taken.name) == 6
    assert _everything(training) == before
    assert training.run(10) == first
    store.close()


def test_a_state_with_a_non_finite_number_is_never_saved(tmp_path: Path) -> None:
    training = mlp()
    store = SnapshotStore(tmp_path, TrainingState(training.model, [training.optimizer]))
    with torch.no_grad():
        training.model[0].weight[0, 0] = float("inf")
    assert store.take(0, healthy=True) is None
    assert store.list() == []
    store.close()


def test_an_unknown_snapshot_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    training = mlp()
    store = SnapshotStore(tmp_path, TrainingState(training.model, [training.optimizer]))
    store.take(3, healthy=True)
    with pytest.raises(BadParameter, match=r"step-9.*step-3"):
        store.restore("step-9")
    store.close()


def test_files_are_private_and_the_oldest_asked_for_are_dropped(tmp_path: Path) -> None:
    training = mlp()
    folder = tmp_path / "snapshots"
    store = SnapshotStore(folder, TrainingState(training.model, [training.optimizer]), memory_bytes=0)
    for step in range(8):
        training.run(1)
        store.take(step, healthy=True)
    store.close()
    assert [s.name for s in store.list()] == [f"step-{s}" for s in range(3, 8)]
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{s}.pt" for s in range(3, 8)]
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_state_over_the_budget_is_saved_on_request_only_and_that_is_told_once(tmp_path: Path) -> None:
    training = mlp()
    told: list[str] = []
    store = SnapshotStore(
        tmp_path, TrainingState(training.model, [training.optimizer]), notify=told.append, periodic_bytes=1000
    )
    for step in range(3):
        training.run(1)
        store.take_if_due(step, healthy=True)
    assert store.list() == []
    assert len(told) == 1
    assert "No periodic snapshots" in told[0]
    assert store.take(3, healthy=True) is not None
    store.close()


def test_a_periodic_snapshot_is_taken_of_a_healthy_run_and_not_of_an_unhealthy_one(tmp_path: Path) -> None:
    training = mlp()
    store = SnapshotStore(tmp_path, TrainingState(training.model, [training.optimizer]))
    store.take_if_due(0, healthy=False)
    assert store.list() == []
    store.take_if_due(1, healthy=True)
    assert [(s.step, s.healthy) for s in store.list()] == [(1, True)]
    store.close()
