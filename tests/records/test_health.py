from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from gradtracer.records import GradientHealth, GradientThresholds, Severity

VANISHING, HEALTHY, SATURATED = GradientHealth.VANISHING, GradientHealth.HEALTHY, GradientHealth.SATURATED
EXPLODING, NON_FINITE = GradientHealth.EXPLODING, GradientHealth.NON_FINITE


@pytest.mark.parametrize(
    ("norm", "state"),
    [
        (0.0, VANISHING),
        (math.nextafter(1e-6, 0), VANISHING),
        (1e-6, HEALTHY),
        (1.0, HEALTHY),
        (math.nextafter(1.0, 2), SATURATED),
        (1e3, SATURATED),
        (math.nextafter(1e3, 1e4), EXPLODING),
        (1e308, EXPLODING),
        (math.inf, NON_FINITE),
        (math.nan, NON_FINITE),
    ],
)
def test_a_norm_on_a_bound_belongs_to_the_milder_state(norm: float, state: GradientHealth) -> None:
    assert GradientThresholds().classify(norm) is state


def test_thresholds_can_be_set() -> None:
    thresholds = GradientThresholds(vanishing=1e-3, saturated=10, exploding=20)
    assert [thresholds.classify(x) for x in (1e-4, 5, 15, 25)] == [VANISHING, HEALTHY, SATURATED, EXPLODING]


@pytest.mark.parametrize("bad", [{"vanishing": 2.0}, {"saturated": 1e3}, {"exploding": 0.5}])
def test_thresholds_out_of_order_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="vanishing < saturated < exploding"):
        GradientThresholds(**bad)


@pytest.mark.parametrize("name", ["vanishing", "saturated", "exploding"])
def test_thresholds_are_positive(name: str) -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        GradientThresholds.model_validate({name: 0.0})


def test_severities_are_ranked_from_mild_to_grave() -> None:
    assert sorted(Severity, key=lambda s: -s.rank) == [Severity.CRITICAL, Severity.WARNING, Severity.INFO]
