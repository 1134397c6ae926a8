from __future__ import annotations

import pytest
from mcp.server.mcpserver.exceptions import ToolError

from gradtracer.errors import CorruptJournal, RunRefused, UnknownLayer
from gradtracer.records import (
    CausalHypothesis,
    Change,
    Diagnosis,
    Document,
    Evidence,
    Intervention,
    InterventionState,
    WaitAnswer,
)
from mcp_server.answering import explain, fit
from tests.recorded_run import event


def length(document: Document) -> int:
    return len(document.model_dump_json())


def hypothesis(code: str, num_evidence: int) -> CausalHypothesis:
    evidence = tuple(Evidence(statement=f"{i} was seen", log_likelihood_ratio=1.0) for i in range(num_evidence))
    return CausalHypothesis(code=code, title=code, probability=0.1, evidence_for=evidence)


def diagnosis(*hypotheses: CausalHypothesis) -> Diagnosis:
    return Diagnosis(run_id="r", step=1, summary="s", hypotheses=hypotheses)


def test_a_short_answer_stays_as_it_is() -> None:
    short = diagnosis(hypothesis("a", 3))
    assert fit(short, length, 20_000) is short


def test_the_least_important_end_is_cut_and_noted() -> None:
    whole = diagnosis(*(hypothesis(f"c{i}", 10) for i in range(20)))
    short = fit(whole, length, 5_000)
    assert length(short) <= 5_000
    kept = len(short.hypotheses)
    assert short.hypotheses == whole.hypotheses[:kept]
    assert 0 < kept < 20
    assert short.left_out == (f"hypotheses: {kept} of 20 are shown; ask a narrower question for more.",)


def test_what_is_inside_an_only_element_is_cut_before_the_element() -> None:
    short = fit(diagnosis(hypothesis("a", 500)), length, 5_000)
    assert length(short) <= 5_000
    assert len(short.hypotheses) == 1
    kept = len(short.hypotheses[0].evidence_for)
    assert short.left_out == (f"hypotheses.0.evidence_for: {kept} of 500 are shown; ask a narrower question for more.",)


def test_an_intervention_notes_the_cut_in_its_outcome() -> None:
    changes = tuple(Change(target=f"optimizer.param_groups[{i}].lr", old=0.1, new=0.01) for i in range(1000))
    whole = Intervention(
        id="i1",
        run_id="r",
        fix="set_learning_rate",
        mode="apply",
        requester="agent",
        state=InterventionState.APPLIED,
        requested_at_s=0,
        changes=changes,
        outcome="in force",
    )
    short = fit(whole, length, 5_000)
    assert length(short) <= 5_000
    assert short.outcome.startswith(f"in force changes: {len(short.changes)} of 1000 are shown")


def test_an_answer_without_lists_that_is_too_long_is_an_error() -> None:
    long = diagnosis().model_copy(update={"summary": "x" * 6_000})
    with pytest.raises(ToolError, match="Ask for less"):
        fit(long, length, 5_000)


def test_a_single_event_is_kept_however_long_its_evidence() -> None:
    one = event(1, 1)
    one = one.model_copy(update={"evidence": one.evidence * 300})
    answer = WaitAnswer(
        run_id="r",
        events=(one,),
        cursor=1,
        timed_out=False,
        state="running",
        step=1,
        loss=None,  # type: ignore[arg-type]
    )
    assert len(fit(answer, length).events) == 1


def test_an_error_that_names_no_tool_gets_one() -> None:
    assert explain(CorruptJournal("it is damaged.")) == "it is damaged. Call list_runs for the other runs."
    assert explain(UnknownLayer("no such layer")).endswith("Call get_layer_stats for the layers.")
    assert explain(RunRefused("not now; call get_intervention")) == "not now; call get_intervention"
