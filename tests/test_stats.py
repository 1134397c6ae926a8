from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest

from gradtracer import stats


def draw(seed: int, num: int, *, ties: bool = False) -> list[float]:
    rng = random.Random(seed)
    return [float(rng.randint(0, 5)) if ties else rng.gauss(0.0, 1.0) ** 3 for _ in range(num)]


def slow_median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


SAMPLES = [draw(seed, num, ties=ties) for seed, num, ties in itertools.product(range(3), (2, 5, 24), (False, True))]


@pytest.mark.parametrize("values", SAMPLES)
def test_median_absolute_deviation_is_the_scaled_median_of_distances(values: list[float]) -> None:
    centre = slow_median(values)
    expected = slow_median([abs(v - centre) for v in values]) * 1.4826022185056018
    assert stats.median_absolute_deviation(values) == pytest.approx(expected, rel=1e-12)


def test_median_absolute_deviation_estimates_sigma_of_a_normal_sample() -> None:
    rng = random.Random(1)
    values = [rng.gauss(3.0, 2.0) for _ in range(20_000)]
    assert stats.median_absolute_deviation(values) == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize("values", SAMPLES)
def test_robust_z_measures_distance_in_robust_deviations(values: list[float]) -> None:
    sigma = stats.median_absolute_deviation(values)
    if sigma > 0:
        assert stats.robust_z(7.5, values) == pytest.approx((7.5 - slow_median(values)) / sigma, rel=1e-12)


def test_robust_z_against_a_constant_reference_is_infinite_unless_the_value_is_equal() -> None:
    assert stats.robust_z(2.0, [1.0, 1.0, 1.0]) == math.inf
    assert stats.robust_z(0.0, [1.0, 1.0, 1.0]) == -math.inf
    assert stats.robust_z(1.0, [1.0, 1.0, 1.0]) == 0.0


@pytest.mark.parametrize("values", SAMPLES)
def test_difference_noise_is_the_scaled_median_of_steps(values: list[float]) -> None:
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    expected = 1.4826022185056018 * slow_median(steps) / math.sqrt(2)
    assert stats.difference_noise(values) == pytest.approx(expected, rel=1e-12)


def test_difference_noise_does_not_see_a_trend() -> None:
    rng = random.Random(2)
    noise = [rng.gauss(0.0, 1.0) for _ in range(5000)]
    flat, steep = stats.difference_noise(noise), stats.difference_noise([n + 0.05 * i for i, n in enumerate(noise)])
    assert flat == pytest.approx(1.0, rel=0.1)
    assert steep == pytest.approx(flat, rel=0.02)


@pytest.mark.parametrize("values", SAMPLES)
def test_theil_sen_slope_is_the_median_over_all_pairs(values: list[float]) -> None:
    slopes = [(values[j] - values[i]) / (j - i) for i, j in itertools.combinations(range(len(values)), 2)]
    assert stats.theil_sen_slope(values) == pytest.approx(slow_median(slopes), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("values", SAMPLES)
def test_kendall_tau_counts_concordant_pairs(values: list[float]) -> None:
    pairs = list(itertools.combinations(values, 2))
    expected = sum((b > a) - (b < a) for a, b in pairs) / len(pairs)
    assert stats.kendall_tau(values) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(SAMPLES[:6], SAMPLES[6:12])))
def test_rank_sum_z_is_that_of_the_pooled_ranks(first: list[float], second: list[float]) -> None:
    pooled = first + second
    ranks = [sum(q < v for q in pooled) + (sum(q == v for q in pooled) + 1) / 2 for v in second]
    n, m = len(first), len(second)
    u = sum(ranks) - m * (m + 1) / 2
    expected = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    assert stats.rank_sum_z(first, second) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_geometric_mean_is_the_root_of_the_product() -> None:
    assert stats.geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="expected positive values, got a smallest of 0"):
        stats.geometric_mean([1.0, 0.0])


@pytest.mark.parametrize("values", SAMPLES)
def test_largest_rise_share_is_the_largest_rise_over_all_rises(values: list[float]) -> None:
    rises = [b - a for a, b in itertools.pairwise(values) if b > a]
    expected = max(rises) / sum(rises) if rises else 0.0
    assert stats.largest_rise_share(values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2), (5, 3), (4, 4)])
def test_exceedance_probability_is_the_share_of_orders_with_the_last_on_top(before: int, after: int) -> None:
    orders = list(itertools.permutations(range(before + after)))
    on_top = sum(min(o[before:]) > max(o[:before]) for o in orders)
    assert stats.exceedance_probability(before, after) == pytest.approx(float(Fraction(on_top, len(orders))))


@pytest.mark.parametrize(
    ("function", "values", "complaint"),
    [
        (stats.median_absolute_deviation, [], "at least 1 values"),
        (stats.theil_sen_slope, [1.0], "at least 2 values"),
        (stats.kendall_tau, [1.0, math.nan, math.inf], "expected finite values, got 2 that are not"),
    ],
)
def test_bad_input_is_refused_with_what_was_expected(function, values, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        function(values)


def test_negative_counts_have_no_exceedance_probability() -> None:
    with pytest.raises(ValueError, match="at least 0, got -1 and 2"):
        stats.exceedance_probability(-1, 2)
