"""Real runs under the tracker: healthy ones stay quiet, faulty ones are named with their root and their fix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradtracer.diagnosis import diagnose
from gradtracer.journal import Journal
from gradtracer.series import Series
from gradtracer.training.tracker import FlowTracker
from tests.detectors.streams import costly
from tests.detectors.zoo import FAULTS, HEALTHY, Build, Fault, deep_sigmoid

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def record(build: Build, seed: int, home: Path) -> Series:
    program = build(seed)
    with FlowTracker(program.model, run_name=build.__name__, serve=False, home=home) as tracker:
        for i in range(program.num_steps):
            tracker.step(loss=program.step(i))
    with Journal(tracker.directory) as journal:
        return Series.from_journal(journal)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("build", HEALTHY, ids=lambda build: build.__name__)
def test_a_healthy_run_has_no_warning_and_is_called_healthy(build: Build, seed: int, tmp_path: Path) -> None:
    run = record(build, seed, tmp_path)
    assert costly(run.events) == []
    assert diagnose(run)[0].code == "healthy"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.build.__name__)
def test_a_fault_is_named_with_its_layer_its_onset_and_its_fix(fault: Fault, seed: int, tmp_path: Path) -> None:
    run = record(fault.build, seed, tmp_path)
    assert costly(run.events)
    first, *_ = diagnose(run)
    assert (first.code, first.layer) == (fault.cause, fault.layer)
    assert first.onset_step is not None
    assert abs(first.onset_step - fault.onset) <= 1
    assert fault.fix is None or fault.fix in [f.fix for f in first.fixes]


def test_layers_of_a_deep_sigmoid_network_fade_in_order_from_the_input_on(tmp_path: Path) -> None:
    first, *_ = diagnose(record(deep_sigmoid, 0, tmp_path))
    depths = [int(layer) for layer in first.affected_layers]
    assert depths == sorted(depths)
    assert len(depths) >= 5
    assert depths[0] == 0
