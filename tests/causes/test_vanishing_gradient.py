from __future__ import annotations

from gradtracer.diagnosis import diagnose
from gradtracer.records import LayerInfo, ModelDescription, SourceLocation
from tests.causes.fabricate import calm, event, fixes, series
from tests.detectors.streams import model

CODE = "vanishing_gradient"
MODEL = model(
    ("fc0", "Linear"), ("s0", "Sigmoid"), ("fc1", "Linear"), ("s1", "Sigmoid"), ("fc2", "Linear"), ("fc3", "Linear")
)


def faded(*layers: str, step: int = 0):
    return [event("vanishing_gradient", step, layer=layer, number=i) for i, layer in enumerate(layers)]


def test_the_root_is_the_layer_nearest_to_the_input_and_the_others_follow_in_order() -> None:
    run = series(calm(60, falling=False), *faded("fc2", "fc0", "fc1"), observations=[MODEL])
    first, *_ = diagnose(run)
    assert (first.code, first.layer, first.onset_step) == (CODE, "fc0", 0)
    assert first.affected_layers == ("fc0", "fc1", "fc2")
    assert first.probability > 0.95
    assert any("Sigmoid" in e.statement for e in first.evidence_for)
    assert fixes(first) == [
        ("layer_scale_init", {"centre": True, "orthonormal": orthonormal}) for orthonormal in (True, False)
    ]
    assert "ReLU" in first.advice


def test_a_layer_that_faded_earlier_is_the_root_although_it_is_nearer_to_the_output() -> None:
    run = series(calm(60), *faded("fc1", step=10), *faded("fc0", step=30), observations=[MODEL])
    first, *_ = diagnose(run)
    assert (first.layer, first.affected_layers, first.onset_step) == ("fc1", ("fc1", "fc0"), 10)


def test_the_source_of_the_root_is_given() -> None:
    here = SourceLocation(file="net.py", line=7, what="Net")
    layer = LayerInfo(name="fc0", type="Linear", num_parameters=9, trainable=True, in_optimizer=True, source=here)
    description = ModelDescription(step=0, type="Net", num_parameters=9, num_bytes=36, layers=(layer,))
    assert diagnose(series(calm(60), *faded("fc0"), observations=[description]))[0].source == here


def test_dead_rectifiers_explain_a_lost_gradient_better() -> None:
    dead = event("dead_units", 0, layer="fc2", state="dead", number=9)
    description = model(("fc0", "Linear"), ("fc1", "Linear"), ("fc2", "Linear"), ("act", "ReLU", "fc2"))
    run = series(calm(60), *faded("fc0"), dead, observations=[description])
    assert diagnose(run)[0].code == "dead_relu"


def test_a_loss_that_falls_all_the_same_speaks_against_it() -> None:
    learning = diagnose(series(calm(200), *faded("fc0"), observations=[MODEL]))
    stalled = diagnose(series(calm(200, falling=False), *faded("fc0"), observations=[MODEL]))
    weight = {name: next(h.probability for h in ranked if h.code == CODE) for name, ranked in
              (("learning", learning), ("stalled", stalled))}  # fmt: skip
    assert weight["learning"] < weight["stalled"]
