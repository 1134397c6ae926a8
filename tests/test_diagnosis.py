from __future__ import annotations

import itertools

import pytest

from gradtracer.diagnosis import diagnose
from gradtracer.records import Diagnosis, NonFiniteOrigin, Severity
from tests.causes.fabricate import INF, calm, event, optimizer, sample, series
from tests.detectors.streams import model

MODEL = model(("fc1", "Linear"), ("act", "ReLU", "fc1"), ("fc2", "Linear"))
RUNS = {
    "nothing recorded": series([]),
    "calm": series(calm(100)),
    "flat": series(calm(100, falling=False)),
    "everything at once": series(
        [*calm(50), *(sample(i, loss=INF, grad_norm=INF, learning_rate=9.0) for i in range(50, 70))],
        *(
            event(kind, step, layer="fc1", number=i, update_ratio=1e-6, elasticity=200.0)
            for i, (kind, step) in enumerate(
                itertools.product(
                    (
                        "update_ratio_too_high", "update_ratio_too_low", "divergence", "loss_spike", "dead_units",
                        "exploding_gradient", "vanishing_gradient", "untrained_parameters", "non_finite",
                    ),
                    (50, 60),
                )
            )
        ),
        observations=[MODEL, optimizer("fc2.weight"), NonFiniteOrigin(step=50, where="data", num_non_finite=1)],
    ),
    "unheard of": series(calm(100), event("something_new", 30, layer="fc2")),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_probabilities_sum_to_one_and_fall(name: str) -> None:
    ranked = diagnose(RUNS[name])
    probabilities = [h.probability for h in ranked]
    assert sum(probabilities) == pytest.approx(1.0)
    assert probabilities == sorted(probabilities, reverse=True)
    assert {"healthy", "unknown"} <= {h.code for h in ranked}
    assert len({h.code for h in ranked}) == len(ranked)


@pytest.mark.parametrize("name", RUNS)
def test_hypotheses_are_documents_that_can_be_stored(name: str) -> None:
    document = Diagnosis(run_id="r", step=0, summary="", hypotheses=diagnose(RUNS[name]))
    assert Diagnosis.model_validate_json(document.model_dump_json()) == document


def test_a_calm_run_is_healthy_and_says_so() -> None:
    first, *_ = diagnose(RUNS["calm"])
    assert (first.code, first.title) == ("healthy", "Nothing is wrong")
    assert first.probability > 0.9
    assert "nothing needs to be done" in first.explanation
    assert first.fixes == ()


def test_a_run_whose_loss_never_fell_is_less_surely_healthy() -> None:
    first, second, *_ = diagnose(RUNS["flat"])
    assert (first.code, second.code) == ("healthy", "unknown")
    assert first.probability < diagnose(RUNS["calm"])[0].probability


def test_a_warning_that_no_cause_explains_is_not_called_healthy() -> None:
    first, *_ = diagnose(RUNS["unheard of"])
    assert (first.code, first.layer, first.onset_step) == ("unknown", "fc2", 30)
    assert first.causal_chain == ("e30-something_new",)


def test_events_of_severity_info_leave_a_run_healthy() -> None:
    plateau = event("plateau", 60, severity=Severity.INFO)
    assert diagnose(series(calm(100), plateau))[0].code == "healthy"


def test_evidence_is_sorted_and_stands_on_the_side_for_which_it_speaks() -> None:
    for hypothesis in diagnose(RUNS["everything at once"]):
        speaks_for = [e.log_likelihood_ratio for e in hypothesis.evidence_for]
        against = [e.log_likelihood_ratio for e in hypothesis.evidence_against]
        assert speaks_for == sorted(speaks_for, reverse=True)
        assert all(ratio > 0 for ratio in speaks_for)
        assert against == sorted(against)
        assert all(ratio <= 0 for ratio in against)


def test_the_causal_chain_is_in_order_of_time() -> None:
    run = RUNS["everything at once"]
    step = {e.id: e.step for e in run.events}
    for hypothesis in diagnose(run):
        steps = [step[i] for i in hypothesis.causal_chain]
        assert steps == sorted(steps)
