from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from gradtracer.errors import BadParameter, UnknownIntervention, UnknownLayer
from gradtracer.journal import JournalWriter
from gradtracer.records import RunState, SemanticEvent, Severity
from gradtracer.samples import LayerTable, Layout
from gradtracer.workspace import Workspace
from tests.recorded_run import LAYERS, TRACK_INTERVAL, RecordedRun, event


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    RecordedRun(tmp_path).write()
    return Workspace(tmp_path)


def test_runs_are_listed_newest_first_and_at_most_so_many(tmp_path: Path) -> None:
    ids = [RecordedRun(tmp_path, name=f"n{i}").write()[0] for i in range(3)]
    found = Workspace(tmp_path).list_runs(limit=2)
    assert [run.run_id for run in found.runs] == [ids[2], ids[1]]
    assert found.total == 3
    assert (found.runs[0].step, found.runs[0].num_warnings) == (99, 2)
    assert found.runs[0].loss == pytest.approx(2.3 * math.exp(-99 / 50), rel=1e-6)


def test_the_status_holds_the_newest_numbers(workspace: Workspace) -> None:
    status = workspace.get_run_status()
    assert (status.state, status.step, status.num_events, status.live) == (RunState.FINISHED, 99, 3, False)
    assert (status.loss_first, status.loss_best) == (2.3, status.loss)
    assert (status.grad_norm, status.learning_rates, status.steps_per_s) == (1.5, (0.1,), pytest.approx(10, rel=1e-5))
    assert [e.id for e in status.events] == ["e3", "e2", "e1"]
    assert [(g.state, g.layers) for g in status.health] == [
        ("vanishing", ("features.0",)),
        ("healthy", ("features.2", "features.4", "head")),
    ]
    assert any("explain_failure" in step for step in status.next_steps)


def test_events_are_filtered(workspace: Workspace) -> None:
    def ids(**wanted: object) -> list[str]:
        return [e.id for e in workspace.get_health_events(**wanted).events]  # type: ignore[arg-type]

    assert ids() == ["e1", "e2", "e3"]
    assert ids(first_step=40) == ["e2", "e3"]
    assert ids(last_step=40) == ["e1", "e2"]
    assert ids(layer="head") == ["e1"]
    assert ids(kind="gradient_health") == ["e1", "e2", "e3"]
    assert ids(min_severity="warning") == ["e2", "e3"]
    assert ids(min_severity=Severity.CRITICAL) == ["e3"]
    assert ids(cursor=2) == ["e3"]


def test_pages_by_cursor_visit_every_event_once(workspace: Workspace) -> None:
    seen: list[str] = []
    cursor, more = 0, True
    while more:
        page = workspace.get_health_events(cursor=cursor, limit=2)
        assert page.total == 3
        seen += [e.id for e in page.events]
        cursor, more = page.cursor, page.more
    assert seen == ["e1", "e2", "e3"]
    last = workspace.get_health_events(cursor=cursor)
    assert (last.events, last.cursor, last.more) == ((), cursor, False)


def test_a_page_of_long_events_ends_early_and_loses_none(tmp_path: Path) -> None:
    long = tuple(event(i, i).model_copy(update={"message": "x" * 4000}) for i in range(1, 9))
    RecordedRun(tmp_path, events=long).write()
    seen: list[SemanticEvent] = []
    more = True
    cursor = 0
    while more:
        page = Workspace(tmp_path).get_health_events(cursor=cursor)
        assert 1 <= len(page.events) < 8
        seen += page.events
        cursor, more = page.cursor, page.more
    assert seen == list(long)


def test_an_unknown_layer_is_an_error_that_names_the_close_ones(workspace: Workspace) -> None:
    for ask in (
        lambda: workspace.get_health_events(layer="feature.0"),
        lambda: workspace.get_metrics(signals=["grad_norm"], layers=["feature.0"]),
        lambda: workspace.get_layer_stats(layers=["feature.0"]),
    ):
        with pytest.raises(UnknownLayer, match=r"no layer 'feature.0'; close to it: features.0.*get_layer_stats"):
            ask()


def test_an_unknown_kind_or_signal_or_cause_is_an_error(workspace: Workspace) -> None:
    with pytest.raises(BadParameter, match="no event kind 'nonsense'"):
        workspace.get_health_events(kind="nonsense")
    with pytest.raises(BadParameter, match=r"no signal 'los'. Did you mean loss\?"):
        workspace.get_metrics(signals=["los"])
    with pytest.raises(BadParameter, match="no cause 'nonsense'"):
        workspace.list_fixes(cause="nonsense")


def test_a_curve_is_reduced_and_keeps_its_extremes(workspace: Workspace) -> None:
    (loss,) = workspace.get_metrics(max_points=20).series
    assert (loss.signal, loss.layer, loss.num_recorded, loss.num_non_finite) == ("loss", None, 100, 1)
    assert len(loss.points) <= 20
    values = {p.step: p.value for p in loss.points}
    assert values[0] == 2.3
    assert values[50] is None
    assert values[99] == pytest.approx(2.3 * math.exp(-99 / 50), rel=1e-6)


def test_a_range_of_steps_is_kept_whole(workspace: Workspace) -> None:
    (norm,) = workspace.get_metrics(signals=["grad_norm"], first_step=10, last_step=14).series
    assert [(p.step, p.value) for p in norm.points] == [(s, 1.5) for s in range(10, 15)]


def test_layer_curves_come_by_layer(workspace: Workspace) -> None:
    answer = workspace.get_metrics(signals=["grad_norm", "weight_norm"], layers=["head", "features.4"])
    assert [(s.signal, s.layer) for s in answer.series] == [
        ("grad_norm", "head"),
        ("grad_norm", "features.4"),
        ("weight_norm", "head"),
        ("weight_norm", "features.4"),
    ]
    assert [p.step for p in answer.series[0].points] == list(range(0, 100, TRACK_INTERVAL))
    assert {p.value for p in answer.series[1].points} == {0.01}


def test_a_signal_that_only_layers_have_is_shown_for_layers(workspace: Workspace) -> None:
    answer = workspace.get_metrics(signals=["update_ratio"])
    assert [s.layer for s in answer.series] == list(LAYERS)
    assert workspace.get_metrics(signals=["dead_unit_fraction"]).series == ()


def test_a_deep_model_shows_layers_spread_over_the_depth_and_says_so(tmp_path: Path) -> None:
    layers = tuple(f"block.{i}" for i in range(100))
    RecordedRun(tmp_path, layers=layers).write()
    answer = Workspace(tmp_path).get_metrics(signals=["update_ratio"])
    shown = [s.layer for s in answer.series]
    assert (len(shown), shown[0], shown[-1]) == (20, layers[0], layers[-1])
    assert "20 of 100 layers" in answer.left_out[0]


def test_a_signal_of_the_run_has_no_layers(workspace: Workspace) -> None:
    with pytest.raises(BadParameter, match="loss is a signal of the whole run"):
        workspace.get_metrics(signals=["loss"], layers=["head"])


def test_look_back_tables_come_into_a_curve_at_their_step(tmp_path: Path) -> None:
    _, directory = RecordedRun(tmp_path).write()
    writer = JournalWriter(directory)
    table = LayerTable(Layout((("head", "grad_norm"),)), np.asarray([7.0], dtype=np.float32), look_back=True)
    writer.add_table(95, table)
    writer.add_table(85, table)
    writer.close()
    (norm,) = Workspace(tmp_path).get_metrics(signals=["grad_norm"], layers=["head"], first_step=80).series
    assert [(p.step, p.value) for p in norm.points] == [(80, 1.0), (85, 7.0), (90, 1.0), (95, 7.0)]
    assert Workspace(tmp_path).get_layer_stats().step == 90


def test_layer_stats_are_those_of_the_sampled_step_before(workspace: Workspace) -> None:
    newest = workspace.get_layer_stats()
    assert newest.step == 90
    assert [(s.layer, s.type, s.health) for s in newest.layers] == [
        ("features.0", "Linear", "vanishing"),
        ("features.2", "Linear", "healthy"),
        ("features.4", "Linear", "healthy"),
        ("head", "Linear", "healthy"),
    ]
    assert [s.signal for s in newest.layers[0].stats] == ["grad_norm", "weight_norm", "update_ratio", "activation_std"]
    assert workspace.get_layer_stats(step=35).step == 30
    assert [s.layer for s in workspace.get_layer_stats(layers=["head"]).layers] == ["head"]


def test_layer_stats_before_the_first_sampled_step_are_an_error(tmp_path: Path) -> None:
    RecordedRun(tmp_path, num_steps=0).write()
    with pytest.raises(BadParameter, match="sampled no layers yet: it does so every 10 steps"):
        Workspace(tmp_path).get_layer_stats()


def test_an_intervention_is_found_by_its_id(workspace: Workspace) -> None:
    assert workspace.get_intervention(None, "i1").fix == "set_learning_rate"
    with pytest.raises(UnknownIntervention, match="it has i1"):
        workspace.get_intervention(None, "i2")


def test_a_run_with_an_empty_journal_is_explained_by_saying_so(tmp_path: Path) -> None:
    _, directory = RecordedRun(tmp_path, state="running").write()
    (directory / "journal.sqlite").unlink()
    JournalWriter(directory).close()
    diagnosis = Workspace(tmp_path).explain_failure()
    assert (diagnosis.step, diagnosis.hypotheses) == (0, ())
    assert "Nothing was recorded yet" in diagnosis.summary


def test_the_report_is_that_of_the_run(workspace: Workspace) -> None:
    report = workspace.get_report()
    assert (report.name, report.state, report.num_steps) == ("digits", RunState.FINISHED, 100)
    assert [e.id for e in report.events] == ["e1", "e2", "e3"]
