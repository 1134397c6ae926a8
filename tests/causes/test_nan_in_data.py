from __future__ import annotations

from dataclasses import replace

import pytest

from gradtracer.diagnosis import diagnose
from gradtracer.records import Intervention, InterventionState, NonFiniteOrigin, Severity
from gradtracer.samples import Sample
from tests.causes.fabricate import INF, calm, event, fixes, sample, series
from tests.detectors.streams import model

CODE = "nan_in_data"
MODEL = model(("fc1", "Linear"), ("act", "ReLU", "fc1"), ("fc2", "Linear"))


def broken(first: int, num: int, *, weights: bool = True) -> list[Sample]:
    layers = {
        name: {"num_non_finite_activation": 3.0, "num_non_finite_weight": 9.0 * weights, "grad_norm": INF}
        for name in ("fc1", "fc2")
    }
    return [sample(i, layers, loss=INF, grad_norm=INF, learning_rate=0.1) for i in range(first, first + num)]


def found(step: int, where: str) -> list:
    return [
        MODEL,
        NonFiniteOrigin(step=step, where=where, num_non_finite=3, detail="A tensor that no layer computed."),  # type: ignore[arg-type]
    ]


def at(step: int, where: str):
    return event("non_finite", step, state=f"non_finite_{where}", severity=Severity.CRITICAL)


def test_a_batch_seen_to_be_non_finite_is_the_cause_and_the_first_layer_received_it() -> None:
    run = series(calm(40) + broken(40, 10), at(40, "data"), observations=found(40, "data"))
    first, *_ = diagnose(run)
    assert (first.code, first.layer, first.onset_step) == (CODE, "fc1", 40)
    assert first.probability > 0.99
    assert fixes(first) == [("impute_inputs", {"layer": "fc1"}), ("skip_nonfinite_step", {})]
    assert all(f.rollback_first for f in first.fixes)


def test_after_one_bad_batch_skipping_comes_first_and_without_it_the_weights_are_lost() -> None:
    run = series(calm(40) + broken(40, 1, weights=False), at(40, "data"), observations=found(40, "data"))
    first, *_ = diagnose(run)
    assert fixes(first) == [("skip_nonfinite_step", {}), ("impute_inputs", {"layer": "fc1"})]
    assert all(f.rollback_first for f in first.fixes)  # the update of this batch has just been made


def test_where_such_steps_are_skipped_the_weights_are_sound() -> None:
    run = series(calm(40) + broken(40, 1, weights=False), at(40, "data"), observations=found(40, "data"))
    skipping = Intervention(
        id="i1", run_id="r", fix="skip_nonfinite_step", mode="apply", requester="policy",
        state=InterventionState.APPLIED, requested_at_s=0.0, applied_step=0,
    )  # fmt: skip
    first, *_ = diagnose(replace(run, interventions=(skipping,)))
    assert not any(f.rollback_first for f in first.fixes)


@pytest.mark.parametrize("where", ["loss", "backward", "forward", "weight"])
def test_non_finite_values_seen_to_begin_elsewhere_speak_against_it(where: str) -> None:
    run = series(calm(40) + broken(40, 10), at(40, where), observations=found(40, where))
    (hypothesis,) = [h for h in diagnose(run) if h.code == CODE]
    assert hypothesis.probability < 0.01


def test_without_an_origin_the_first_layer_with_a_non_finite_output_is_weaker_evidence() -> None:
    run = series(calm(40) + broken(40, 10, weights=False), at(40, "forward"), observations=[MODEL])
    (hypothesis,) = [h for h in diagnose(run) if h.code == CODE]
    assert hypothesis.layer == "fc1"
    assert 0.1 < hypothesis.probability < 0.9


def test_a_gradient_that_grew_before_speaks_against_it() -> None:
    growing = [sample(i, loss=1.0, grad_norm=10.0 ** (i - 36), learning_rate=0.1) for i in range(38, 40)]
    calm_run = series(calm(40) + broken(40, 3), at(40, "data"), observations=found(40, "data"))
    grown = series(calm(38) + growing + broken(40, 3), at(40, "data"), observations=found(40, "data"))
    statements = [e.statement for e in diagnose(grown)[0].evidence_against]
    assert "The gradient grew before." in statements
    assert diagnose(grown)[0].probability < diagnose(calm_run)[0].probability
