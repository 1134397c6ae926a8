from __future__ import annotations

from gradtracer.diagnosis import diagnose
from tests.causes.fabricate import calm, event, fixes, optimizer, series
from tests.detectors.streams import model

CODE = "missing_optimizer_params"
MODEL = model(("body", "Linear"), ("neck", "Linear"), ("head", "Linear"))
STILL = {"head": {"weight_norm": 3.0}, "neck": {"weight_norm": 2.0}}


def untrained(layer: str):
    return event("untrained_parameters", 19, layer=layer)


def test_the_layers_that_no_optimizer_holds_are_named_in_forward_order_with_what_to_write() -> None:
    run = series(
        calm(60, layers=STILL),
        untrained("neck"),
        observations=[MODEL, optimizer("head.weight", "head.bias", "neck.weight")],
    )
    first, *_ = diagnose(run)
    assert (first.code, first.layer, first.affected_layers, first.onset_step) == (CODE, "neck", ("neck", "head"), 0)
    assert first.probability > 0.95
    assert fixes(first) == [("add_missing_parameters", {})]
    assert "Adam(model.parameters()" in first.advice
    assert any("have not changed" in e.statement for e in first.evidence_for)


def test_weights_that_change_all_the_same_speak_against_it() -> None:
    moving = [s for k in range(6) for s in calm(10, layers={"head": {"weight_norm": 3.0 + 0.1 * k}}, first=10 * k)]
    run = series(moving, untrained("head"), observations=[MODEL, optimizer("head.weight")])
    (hypothesis,) = [h for h in diagnose(run) if h.code == CODE]
    assert hypothesis.probability < 0.1


def test_parameters_of_a_layer_that_was_replaced_are_further_evidence() -> None:
    run = series(calm(60), untrained("head"), observations=[optimizer("head.weight", num_foreign=2)])
    assert any("since replaced" in e.statement for e in diagnose(run)[0].evidence_for)


def test_an_optimizer_that_holds_everything_is_not_charged() -> None:
    assert CODE not in [h.code for h in diagnose(series(calm(60), observations=[MODEL, optimizer()]))]
