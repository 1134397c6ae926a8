from __future__ import annotations

import pytest

from gradtracer.detectors import DETECTORS
from gradtracer.records import Severity
from gradtracer.samples import Sample
from tests.detectors.streams import events, model, sample

Rule = DETECTORS["vanishing_gradient"]
LAYERS = [f"fc{i}" for i in range(8)]
MODEL = model(*((name, "Linear") for name in LAYERS))


def profile(
    rms: list[float], step: int = 0, loss: float = 2.3, *, adaptive: bool = False, scale: float = 1.0
) -> Sample:
    layers = {
        name: {
            "grad_norm": scale * 10 * r,
            "grad_mean": scale * 0.6 * r,
            "grad_std": scale * 0.8 * r,
            "update_ratio": 1e-3 if adaptive else 1e-2 * r,
        }
        for name, r in zip(LAYERS, rms, strict=True)
    }
    return sample(step, layers, loss=scale * loss)


FADED = [10.0 ** (i - 7) for i in range(8)]


def test_layers_that_the_gradient_does_not_reach_are_reported_from_the_input_on() -> None:
    found = events(Rule(), [MODEL, *(profile(FADED, step) for step in range(5))])
    assert [(e.layer, e.step, e.severity) for e in found] == [
        (name, 0, Severity.WARNING) for name in ("fc0", "fc1", "fc2", "fc3", "fc4")
    ]
    assert {m.name: m.value for m in found[0].evidence} == {
        "gradient_rms_relative_to_output": pytest.approx(1e-7, rel=1e-3),
        "fall_over_depth": pytest.approx(7.0, rel=1e-3),
        "depth_trend": pytest.approx(1.0),
        "update_ratio_relative_to_output": pytest.approx(1e-7, rel=1e-3),
    }


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_the_loss_does_not_matter(scale: float) -> None:
    found = events(Rule(), [MODEL, *(profile(FADED, step, scale=scale) for step in range(5))])
    assert [e.layer for e in found] == ["fc0", "fc1", "fc2", "fc3", "fc4"]


@pytest.mark.parametrize(
    "rms",
    [
        pytest.param([1e-9 * (1 + i / 10) for i in range(8)], id="small everywhere: a run that has converged"),
        pytest.param([0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0], id="two decades: usual"),
        pytest.param([1e-7] * 4 + [1.0] * 4, id="one step: a cut or a dead layer, no fade"),
        pytest.param(FADED[::-1], id="falls toward the output"),
        pytest.param([1e-7, 1.0, 1e-7, 1.0, 1e-7, 1.0, 1e-7, 1.0], id="branches of different scale"),
    ],
)
def test_other_profiles_are_not_reported(rms: list[float]) -> None:
    assert events(Rule(), [MODEL, *(profile(rms, step) for step in range(5))]) == []


def test_under_an_adaptive_optimizer_a_fade_counts_once_the_loss_has_stalled() -> None:
    falling = [profile(FADED, i, loss=2.3 * 0.97**i, adaptive=True) for i in range(80)]
    stalled = [profile(FADED, i, loss=2.3 - 0.001 * (i % 7), adaptive=True) for i in range(80)]
    assert events(Rule(), [MODEL, *falling]) == []
    assert events(Rule(), [MODEL, *stalled])[0].step == 49


def test_embeddings_and_normalisations_are_no_part_of_the_depth() -> None:
    kinds = ["Embedding", "LayerNorm", *["Linear"] * 6]
    description = model(*zip(LAYERS, kinds, strict=True))
    rms = [1e-9, 1e-8, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]
    assert events(Rule(), [description, *(profile(rms, step) for step in range(5))]) == []


def test_the_forward_order_is_taken_from_the_model_and_not_from_the_table() -> None:
    backwards = model(*((name, "Linear") for name in reversed(LAYERS)))
    assert events(Rule(), [backwards, *(profile(FADED, step) for step in range(5))]) == []


def test_three_layers_are_too_few_for_a_trend() -> None:
    layers = {n: {"grad_norm": r, "update_ratio": r} for n, r in (("a", 1e-9), ("b", 1e-5), ("c", 1.0))}
    assert Rule().assess(sample(0, layers, loss=1.0)) is None


def test_an_episode_is_closed_when_the_gradient_arrives_again() -> None:
    healthy = [0.1 * (i + 2) for i in range(8)]
    stream = [profile(FADED, i) for i in range(5)] + [profile(healthy, i) for i in range(5, 10)]
    assert {(e.step, e.last_step, e.open) for e in events(Rule(), [MODEL, *stream])} == {(0, 4, False)}
