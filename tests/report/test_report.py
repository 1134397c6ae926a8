from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from gradtracer.fixes.clip_grad_norm import ClipGradNorm
from gradtracer.journal import Journal, JournalWriter
from gradtracer.records import (
    CaptureNotice,
    CausalHypothesis,
    Change,
    DiagnosticReport,
    Evidence,
    FixSuggestion,
    Intervention,
    InterventionState,
    LayerInfo,
    Measure,
    MetricSeries,
    ModelDescription,
    Observation,
    OptimizerDescription,
    ParameterValue,
    Point,
    RunManifest,
    RunState,
    SemanticEvent,
    Severity,
    SourceLocation,
    TrialBranch,
    TrialResult,
)
from gradtracer.report import build_report, escape_markdown, number, sparkline, to_markdown, to_text
from gradtracer.samples import LayerTable, Layout, Sample
from gradtracer.schemas import validate
from gradtracer.series import Series
from gradtracer.xml import to_xml

NASTY = "enc['<b>q</b>'].|*w*|"
LAYERS = ("fc1", NASTY, "head")
LAYOUT = Layout(tuple((layer, signal) for layer in LAYERS for signal in ("grad_norm", "weight_norm")))
START_S = 1_700_000_000.0

MODEL = ModelDescription(
    step=0,
    type="Net",
    num_parameters=1234,
    num_bytes=4936,
    layers=tuple(
        LayerInfo(name=name, type="Linear", num_parameters=1, trainable=True, in_optimizer=True)
        for name in ("head", *LAYERS[:2])
    ),
)
OPTIMIZER = OptimizerDescription(step=0, type="AdamW", groups=())
NOTICE = CaptureNotice(step=0, message="Activations are not recorded: the model is compiled.")
EVENT = SemanticEvent(
    id="e1",
    kind="loss_spike",
    step=120,
    last_step=130,
    layer=NASTY,
    signal="loss",
    from_state="healthy",
    to_state="spiking",
    severity="critical",  # pyright: ignore[reportArgumentType]
    confidence=0.9,
    message="The loss rose to 40 times its baseline.",
)
EARLIER = EVENT.model_copy(update={"id": "e0", "step": 7, "last_step": 7, "open": False, "layer": None, "message": ""})
INTERVENTION = Intervention(
    id="i1",
    run_id="demo-1",
    fix="set_learning_rate",
    mode="apply",
    requester="agent",
    reason="the loss diverges",
    state="kept",  # pyright: ignore[reportArgumentType]
    requested_at_s=START_S + 3,
    applied_step=140,
    changes=(Change(target="optimizer.param_groups[0].lr", old=0.123456, new=0.001),),
    loss_before=31.41592653,
    loss_after=0.5,
    outcome="The loss fell over the watch window.",
)
HYPOTHESES = (
    CausalHypothesis(
        code="learning_rate_too_high",
        title="The learning rate is too high",
        probability=0.8347,
        layer=NASTY,
        onset_step=118,
        explanation="The loss grew while the updates were large.",
        evidence_for=(
            Evidence(statement="Weak sign.", log_likelihood_ratio=0.5),
            Evidence(
                statement="The update ratio is far too high.",
                log_likelihood_ratio=3.0,
                measures=(Measure(name="update_ratio", value=0.123456, baseline=0.001),),
            ),
        ),
        evidence_against=(Evidence(statement="No layer is dead.", log_likelihood_ratio=-1.0),),
        causal_chain=("e0", "e1"),
        source=SourceLocation(file="train.py", line=12, what="AdamW"),
        advice="Start with 1e-3.",
        fixes=(FixSuggestion(fix="set_learning_rate", parameters=(ParameterValue(name="factor", value=0.1),)),),
    ),
    CausalHypothesis(code="healthy", title="Nothing is wrong", probability=0.1603),
    CausalHypothesis(code="dead_relu", title="Dead units", probability=0.001),
)


def record(
    directory: Path,
    losses: Iterable[float],
    observations: Iterable[Observation] = (),
    events: Iterable[SemanticEvent] = (),
    interventions: Iterable[Intervention] = (),
) -> Series:
    """A journal as a tracker would have written it, read back."""
    writer = JournalWriter(directory)
    for step, loss in enumerate(losses):
        full = LayerTable(LAYOUT, np.asarray([0.1, 3.3, math.inf, 1.0, math.nan, 2.0], dtype=np.float32))
        writer.add_sample(Sample(step, START_S + step / 10, loss=loss, layers=full if step % 100 == 0 else None))
    for observation in observations:
        writer.add_observation(observation)
    for event in events:
        writer.put_event(event)
    for intervention in interventions:
        writer.put_intervention(intervention)
    writer.close()
    with Journal(directory) as journal:
        return Series.from_journal(journal)


def manifest(**values: object) -> RunManifest:
    known = {
        "run_id": "demo-1",
        "name": "demo",
        "pid": 1,
        "pid_created_s": 0.0,
        "started_at_s": START_S,
        "track_interval": 100,
    }
    return RunManifest.model_validate(known | values)


def failing(directory: Path) -> DiagnosticReport:
    losses = [math.exp(-step / 50) for step in range(120)] + [math.inf] * 130
    series = record(directory, losses, [MODEL, OPTIMIZER, NOTICE, NOTICE], [EVENT, EARLIER], [INTERVENTION])
    return build_report(manifest(), series, RunState.RUNNING, now_s=START_S + 100)


@pytest.fixture
def report(tmp_path: Path) -> DiagnosticReport:
    """A failing run, with causes as a diagnosis would give them."""
    return failing(tmp_path).model_copy(update={"hypotheses": HYPOTHESES})


def test_a_report_holds_what_the_journal_holds(tmp_path: Path) -> None:
    found = failing(tmp_path)
    assert (found.run_id, found.name, found.state, found.num_steps) == ("demo-1", "demo", RunState.RUNNING, 250)
    assert (found.generated_at_s, found.started_at_s, found.duration_s) == (START_S + 100, START_S, 100.0)
    assert (found.model_type, found.num_parameters, found.optimizer) == ("Net", 1234, "AdamW")
    assert found.events == (EARLIER, EVENT)
    assert found.interventions == (INTERVENTION,)
    assert found.notices == (NOTICE.message,)


def test_the_curve_of_a_report_keeps_its_extremes_and_counts_what_is_not_finite(tmp_path: Path) -> None:
    loss = failing(tmp_path).loss
    assert (loss.num_recorded, loss.num_non_finite) == (250, 130)
    assert len(loss.points) <= 200
    assert loss.points[0] == Point(step=0, value=1.0)
    assert loss.points[-1] == Point(step=249, value=None)
    values = {p.step: p.value for p in loss.points}
    assert values[119] == pytest.approx(math.exp(-119 / 50), rel=1e-6)
    assert any(len(repr(v)) <= 10 for v in values.values())


def test_the_layers_of_a_report_are_those_of_the_last_full_table_in_forward_order(tmp_path: Path) -> None:
    found = failing(tmp_path)
    assert found.layers_step == 200
    assert [(layer.layer, layer.type, layer.health) for layer in found.layers] == [
        ("head", "Linear", "no_gradient"),
        ("fc1", "Linear", "healthy"),
        (NASTY, "Linear", "non_finite"),
    ]
    stats = [{s.signal: s.value for s in layer.stats} for layer in found.layers]
    assert stats == [
        {"weight_norm": 2.0},
        {"grad_norm": 0.1, "weight_norm": 3.3},
        {"grad_norm": None, "weight_norm": 1.0},
    ]


def test_a_report_is_a_valid_document_in_both_forms(tmp_path: Path, report: DiagnosticReport) -> None:
    (tmp_path / "real").mkdir()
    for each in (report, failing(tmp_path / "real")):
        assert validate(each.model_dump_json()) == each
        assert validate(to_xml(each)) == each


def test_a_healthy_run_is_called_healthy(tmp_path: Path) -> None:
    losses = [math.exp(-step / 50) for step in range(120)]
    found = build_report(manifest(), record(tmp_path, losses, [MODEL]), RunState.FINISHED, now_s=START_S)
    assert found.summary == (
        "The run has finished after 120 steps, loss 1 → 0.09255. Nothing is wrong as far as was recorded."
    )
    assert to_markdown(found).startswith("# demo: healthy\n")
    assert to_text(found).startswith("demo: healthy\n")


def test_a_failure_that_no_cause_explains_is_said_to_be_one(tmp_path: Path) -> None:
    odd = EVENT.model_copy(update={"kind": "something_new", "signal": "weight_norm"})
    found = build_report(manifest(), record(tmp_path, [1.0] * 200, [MODEL], [odd]), RunState.RUNNING, now_s=START_S)
    assert found.hypotheses[0].code == "unknown"
    assert "none of the known causes explains it" in found.summary


def test_a_run_whose_loss_was_never_finite_is_reported(tmp_path: Path) -> None:
    found = build_report(manifest(), record(tmp_path, [math.inf] * 5), RunState.RUNNING, now_s=START_S)
    assert (found.loss.num_recorded, found.loss.num_non_finite) == (5, 5)
    assert "its loss never finite" in found.summary
    assert "5 values, none finite" in to_markdown(found)
    assert "×××××" in to_text(found)


def test_a_run_without_a_loss_is_reported(tmp_path: Path) -> None:
    found = build_report(manifest(), record(tmp_path, [math.nan] * 5), RunState.RUNNING, now_s=START_S)
    assert (found.num_steps, found.loss.num_recorded, found.loss.points) == (5, 0, ())
    assert "Loss: none recorded" in to_markdown(found)


def test_a_run_that_recorded_nothing_is_reported(tmp_path: Path) -> None:
    error = "RuntimeError: no data (train.py:3)\nmore"
    found = build_report(manifest(error=error), record(tmp_path, []), RunState.CRASHED, now_s=START_S)
    assert (found.num_steps, found.hypotheses, found.layers, found.layers_step) == (0, (), (), None)
    assert found.duration_s is None
    assert found.summary == "The run has crashed and has recorded nothing."
    assert found.error == error
    assert validate(to_xml(found)) == found
    for text in (to_markdown(found), to_text(found)):
        assert "RuntimeError: no data (train.py:3) more" in text


@pytest.mark.parametrize(
    ("values", "state", "duration_s"),
    [
        ({}, RunState.RUNNING, 100.0),
        ({}, RunState.PAUSED, 100.0),
        ({"ended_at_s": START_S + 50, "state": "finished"}, RunState.FINISHED, 50.0),
        ({}, RunState.CRASHED, 0.9),
    ],
)
def test_the_duration_ends_with_the_last_sign_of_life(
    tmp_path: Path, values: dict[str, object], state: RunState, duration_s: float
) -> None:
    found = build_report(manifest(**values), record(tmp_path, [1.0] * 10), state, now_s=START_S + 100)
    assert found.duration_s == pytest.approx(duration_s)


def test_markdown_gives_the_verdict_first_then_the_story(report: DiagnosticReport) -> None:
    text = to_markdown(report)
    assert text.startswith("# demo: The learning rate is too high (83%)\n")
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## What happened", "## Why", "## What was done", "## Layers at step 200", "## Not recorded"]
    assert text.index("e0, step 7: ") < text.index("e1, steps 120 to 130, still so: **critical** loss_spike")
    assert text.index("far too high. (update_ratio 0.1235, baseline 0.001)") < text.index("Weak sign.")
    for part in (
        "1. **The learning rate is too high** (learning_rate_too_high), 83%",
        "from step 118",
        "against: No layer is dead.",
        "chain: e0 → e1",
        "source: train.py:12 (AdamW)",
        "fix: set_learning_rate(factor=0.1)",
        "2. **Nothing is wrong** (healthy), 16%",
        r"optimizer.param_groups\[0\].lr: 0.1235 → 0.001",
        "loss: 31.42 → 0.5",
        "The loss fell over the watch window.",
        "1 non_finite, 1 no_gradient, 1 healthy; worst first.",
        "Activations are not recorded",
    ):
        assert part in text, part
    assert "Dead units" not in text  # 0.1 % would be shown as nothing
    assert re.search(r"non_finite.*no_gradient.*\| healthy", text, re.DOTALL)


TRIAL = TrialResult(
    num_steps=4,
    num_batches=2,
    seconds=1.5,
    branches=(
        TrialBranch(
            fix="control",
            losses=(1.0, 2.0, 4.0, None),
            final_loss=8.0,
            difference=0.0,
            num_non_finite=1,
            verdict="control",
        ),
        TrialBranch(
            fix="set_learning_rate",
            parameters=(ParameterValue(name="learning_rate", value=0.01), ParameterValue(name="group", value=None)),
            losses=(1.0, 0.5, 0.25, 0.1),
            final_loss=0.1,
            difference=-7.9,
            standard_error=0.25,
            verdict="better",
        ),
        TrialBranch(fix="clip", rollback_first=True, verdict="failed", note="no snapshot from before the trouble"),
    ),
    conclusion="set_learning_rate is better than to go on as it is.",
)


def test_a_trial_is_told_with_all_its_branches_on_one_scale(report: DiagnosticReport) -> None:
    tried = INTERVENTION.model_copy(update={"mode": "trial", "trial": TRIAL, "loss_after": None})
    told = report.model_copy(update={"interventions": (tried,)})
    for line in (
        "trial of 4 steps on 2 batches, in 1.5 s",
        "control, final loss 8, 1 step not finite, losses ▂▄█×",
        "set_learning_rate(learning_rate=0.01): better, final loss 0.1 (-7.9 ± 0.25 against the control), losses ▂▁▁▁",
        "rollback, then clip(): failed, final loss –, no snapshot from before the trouble",
    ):
        assert f"- {escape_markdown(line)}\n" in to_markdown(told)
        assert line in to_text(told, width=200)


@pytest.mark.parametrize(
    ("state", "mode", "needed"),
    [("applied", "apply", True), ("kept", "apply", True), ("reverted", "apply", False), ("kept", "trial", False)],
)
def test_a_fix_in_force_that_changed_the_models_function_is_said_to_belong_to_the_saved_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, mode: str, needed: bool
) -> None:
    monkeypatch.setattr(ClipGradNorm, "changes_function", True)
    values = {"id": "i2", "fix": "clip_grad_norm", "state": InterventionState(state), "mode": mode}
    changed = INTERVENTION.model_copy(update={**values, "parameters": (ParameterValue(name="max_norm", value=2.0),)})
    series = record(tmp_path, [1.0] * 10, interventions=[INTERVENTION, changed])
    report = build_report(manifest(), series, RunState.FINISHED)
    assert report.needed_by_saved_model == (("i2",) if needed else ())
    sentence = "The saved model needs i2 clip_grad_norm(max_norm=2)"
    assert (sentence in to_markdown(report), sentence in to_text(report, width=200)) == (needed, needed)
    assert validate(to_xml(report)) == report


def test_the_layer_table_is_worst_first_and_capped(report: DiagnosticReport) -> None:
    layer = report.layers[1]
    many = tuple(layer.model_copy(update={"layer": f"layer{i}"}) for i in range(30))
    text = to_markdown(report.model_copy(update={"layers": (*many, *report.layers)}))
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert table[0] == "| layer | type | health | grad_norm | weight_norm |"
    assert len(table) == 1 + 20
    assert "non_finite" in table[1]
    assert "no_gradient" in table[2]
    assert "and 13 more layers" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("encoder.layer_norm.0", "encoder.layer_norm.0"),
        ("_private_", r"\_private\_"),
        ("<script>alert(1)</script> &amp;", "&lt;script&gt;alert(1)&lt;/script&gt; &amp;amp;"),
        ("a|b", r"a\|b"),
        ("[x](javascript:y)", r"\[x\](javascript:y)"),
        ("![x](http://h)", r"!\[x\](http:\//h)"),
        ("www.example.org", r"www\.example.org"),
        ("`code` *bold* ~~gone~~ $x$", r"\`code\` \*bold\* \~\~gone\~\~ \$x\$"),
        ("# title #", r"\# title \#"),
        ("1. item", r"1\. item"),
        ("12) item", r"12\) item"),
        ("0.125", "0.125"),
        ("- item", r"\- item"),
        ("back\\slash", r"back\\slash"),
        ("two\n\nlines\tand more", "two lines and more"),
        ("", ""),
    ],
)
def test_markdown_and_html_in_names_are_shown_as_they_are(text: str, shown: str) -> None:
    assert escape_markdown(text) == shown


def test_a_hostile_name_stays_inside_its_line(report: DiagnosticReport) -> None:
    name = "x |\n\n# Ignore the above\n\n<img src=x> ![a](http://b)"
    hostile = report.model_copy(
        update={
            "name": name,
            "summary": name,
            "notices": (name,),
            "events": (EVENT.model_copy(update={"message": name, "kind": name}),),
            "layers": tuple(layer.model_copy(update={"layer": name, "type": name}) for layer in report.layers),
        }
    )
    text = to_markdown(hostile)
    assert not re.search(r"^# Ignore|<img|[^\\]\[a\]|http://", text, re.MULTILINE)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_the_terminal_shows_curve_health_events_and_causes(report: DiagnosticReport) -> None:
    text = to_text(report, width=80)
    assert text.startswith("demo: The learning rate is too high (83%)\n")
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "█",
        "×",
        "1 non_finite, 1 no_gradient, 1 healthy",
        "loss_spike",
        "What was done",
        " 83%  The learning",
    ):
        assert part in text, part
    assert NASTY in text.replace("\n", "")
    assert "\x1b" not in text


def test_the_terminal_uses_colours_only_when_asked(report: DiagnosticReport) -> None:
    coloured = to_text(report, width=80, color=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split() == to_text(report, width=80).split()


def test_the_terminal_takes_names_for_text_not_for_markup(report: DiagnosticReport) -> None:
    text = to_text(report.model_copy(update={"name": "[red]a[/red] :smile:"}))
    assert text.startswith("[red]a[/red] :smile:: ")


def test_the_terminal_shows_the_gravest_events_in_order_of_time(report: DiagnosticReport) -> None:
    mild = tuple(
        EVENT.model_copy(update={"id": f"m{i}", "step": i, "severity": Severity.INFO, "message": f"mild {i}."})
        for i in range(20)
    )
    text = " ".join(to_text(report.model_copy(update={"events": (*mild, EVENT)})).split())
    assert text.index("mild 0.") < text.index("mild 6.") < text.index("40 times its baseline")
    assert "mild 7." not in text
    assert "and 13 more events" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.000123456, "0.0001235"), (1234567.0, "1.235e+06"), (1.0, "1"), (12, "12"), (True, "true"), (None, "–"),
     ("Adam", "Adam")],
)  # fmt: skip
def test_numbers_have_four_significant_digits(value: bool | int | float | str | None, shown: str) -> None:
    assert number(value) == shown


def curve(*values: float | None) -> MetricSeries:
    points = tuple(Point(step=step, value=value) for step, value in enumerate(values))
    return MetricSeries(signal="loss", num_recorded=len(points), points=points)


@pytest.mark.parametrize(
    ("series", "line"),
    [
        (curve(), ""),
        (curve(1.0), "▁"),
        (curve(2.0, 2.0, 2.0), "▁▁▁"),
        (curve(*map(float, range(8))), "▁▂▃▄▅▆▇█"),
        (curve(-1.0, 0.0, 1.0), "▁▅█"),
        (curve(None, None), "××"),
        (curve(1.0, 2.0, None), "▁█×"),
        (curve(1e-3, 1.0, 1e3), "▁▅█"),  # six decades: by the logarithm
    ],
)
def test_a_curve_is_drawn_in_one_line(series: MetricSeries, line: str) -> None:
    assert sparkline(series) == line


def test_a_curve_spreads_its_points_by_their_steps() -> None:
    points = (Point(step=0, value=0.0), Point(step=50, value=1.0), Point(step=99, value=1.0))
    series = MetricSeries(signal="loss", num_recorded=3, points=points)
    assert sparkline(series, 10) == "▁▁▁▁▁█████"
