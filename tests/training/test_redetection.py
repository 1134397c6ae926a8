"""Rules run over an old journal find what they found live."""

from __future__ import annotations

import pytest
import torch

from gradtracer import FlowTracker
from gradtracer.journal import Journal
from gradtracer.records import Severity
from gradtracer.redetection import redetect
from gradtracer.series import Series
from tests.families import family
from tests.training.models import Training, mlp


def _train(training: Training, spoil_at: int | None) -> Series:
    with FlowTracker(training.model, training.optimizer) as tracker:
        for step in range(120):
            if step == spoil_at:
                training.optimizer.param_groups[0]["lr"] = 50.0
            training.run(1)
    with Journal(tracker.directory) as journal:
        return Series.from_journal(journal)


@pytest.mark.parametrize("spoil_at", family([None, 60], 60))
def test_the_same_rules_find_the_same_events_again(spoil_at: int | None) -> None:
    series = _train(mlp(), spoil_at)
    again = redetect(series)

    def serious(found: Series) -> list[tuple[object, ...]]:
        return sorted(
            (e.kind, e.layer or "", e.step, e.to_state, e.severity.value)
            for e in found.events
            if e.severity is not Severity.INFO
        )

    assert serious(again) == serious(series)
    assert bool(serious(again)) == (spoil_at is not None)
    assert torch.is_grad_enabled()


def test_a_journal_without_its_events_is_diagnosed_anew() -> None:
    series = _train(mlp(), 60)
    bare = Series(series.columns, series.tables, observations=series.observations)
    assert not bare.events
    assert redetect(bare).events
