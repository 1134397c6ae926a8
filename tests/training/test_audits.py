"""The seam for what numbers alone don't show."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch.optim import Optimizer

from gradtracer import FlowTracker
from gradtracer.journal import Journal
from gradtracer.records import AuditFinding, CaptureNotice
from gradtracer.series import Series
from gradtracer.training import tracker as tracker_module
from gradtracer.training.audits import LOSS, Audit, AuditContext, finding
from gradtracer.training.graph import LossGraph
from tests.training.models import mlp


class Looking(Audit):
    code = "looking"

    def on_loss(self, context: AuditContext, graph: LossGraph) -> Iterable[AuditFinding]:
        context.record(LOSS, "activation_mean", graph.loss.detach())
        yield finding(context, "seen", "a loss was seen", layer="0")


class Breaking(Audit):
    code = "breaking"

    def on_update(self, context: AuditContext, optimizer: Optimizer) -> Iterable[AuditFinding]:
        raise ZeroDivisionError("a bug of ours")


def test_what_audits_find_is_told_once_becomes_an_event_and_their_numbers_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker_module, "all_audits", lambda: [Looking()])
    training = mlp()
    with FlowTracker(training.model) as tracker:
        losses = training.run(5)
    with Journal(tracker.directory) as journal:
        series = Series.from_journal(journal)
    assert [(f.step, f.layer) for f in series.audit("seen")] == [(0, "0")]
    (event,) = [e for e in tracker.events if e.kind == "audit"]
    assert (event.to_state, event.step, event.layer, event.severity.value) == ("seen", 0, "0", "warning")
    assert series.layer(LOSS, "activation_mean")[1] == pytest.approx(losses, rel=1e-6)


def test_an_audit_that_raises_is_turned_off_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_module, "all_audits", lambda: [Breaking(), Looking()])
    plain = mlp().run(5)
    training = mlp()
    with FlowTracker(training.model) as tracker:
        assert training.run(5) == plain
    with Journal(tracker.directory) as journal:
        series = Series.from_journal(journal)
    assert len(series.layer(LOSS, "activation_mean")[1]) == 5
    (notice,) = [o for o in series.observations if isinstance(o, CaptureNotice)]
    assert "breaking" in notice.message
    assert len([r for r in caplog.records if "error of its own" in r.getMessage()]) == 1
    caplog.clear()
    assert torch.is_grad_enabled()
