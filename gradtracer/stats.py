"""Robust statistics: pure functions on arrays.

Training signals are noisy, heavy-tailed and of unknown scale, so everything here rests on order, on medians or on
ratios. Inputs must be finite; callers drop what `gradtracer.signals` codes as missing or non-finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | NDArray[np.floating]

# sigma / MAD of a normal distribution, 1 / Phi^-1(3/4): Rousseeuw & Croux 1993, section 1.
MAD_TO_SIGMA = 1.4826022185056018


def median_absolute_deviation(values: Values) -> float:
    """Median distance from the median, scaled so that it estimates the standard deviation of a normal sample.

    ``sigma = 1.4826 * median |x_i - median(x)|`` (Rousseeuw & Croux 1993); half of the values may be outliers.

    Raises:
        ValueError: If there are no values.
    """
    x = _array(values, 1)
    return float(MAD_TO_SIGMA * np.median(np.abs(x - np.median(x))))


def robust_z(value: float, reference: Values) -> float:
    """Distance of a value from the median of a reference, in robust standard deviations.

    Returns:
        ``(value - median) / sigma``; signed infinity where the reference is constant and the value differs.

    Raises:
        ValueError: If the reference is empty.
    """
    x = _array(reference, 1)
    distance = value - float(np.median(x))
    sigma = median_absolute_deviation(x)
    if sigma > 0:
        return distance / sigma
    return math.copysign(math.inf, distance) if distance else 0.0


def difference_noise(values: Values) -> float:
    """Standard deviation of the noise around a trend of any shape.

    Successive differences cancel the trend: ``sigma = 1.4826 * median |x_i+1 - x_i| / sqrt(2)`` (after von Neumann
    1941, with the median in place of the mean square).

    Raises:
        ValueError: If there are fewer than 2 values.
    """
    return float(MAD_TO_SIGMA * np.median(np.abs(np.diff(_array(values, 2)))) / math.sqrt(2))


def theil_sen_slope(values: Values) -> float:
    """Median slope over all pairs of points at positions 0, 1, 2, ... (Sen 1968).

    ``slope = median_{i<j} (x_j - x_i) / (j - i)``; up to 29 % of the points may be outliers.

    Raises:
        ValueError: If there are fewer than 2 values.
    """
    x = _array(values, 2)
    i, j = np.triu_indices(len(x), k=1)
    return float(np.median((x[j] - x[i]) / (j - i)))


def kendall_tau(values: Values) -> float:
    """Kendall's tau-a between the values and their positions: 1 rises throughout, -1 falls throughout, 0 no trend.

    ``tau = sum_{i<j} sign(x_j - x_i) / (n (n - 1) / 2)`` (Kendall 1938; as a test for trend: Mann 1945).

    Raises:
        ValueError: If there are fewer than 2 values.
    """
    x = _array(values, 2)
    i, j = np.triu_indices(len(x), k=1)
    return float(np.mean(np.sign(x[j] - x[i])))


def rank_sum_z(first: Values, second: Values) -> float:
    """How far the second sample lies above the first, in standard deviations of the rank sum.

    Mann & Whitney 1947: ``U = #{x < y} + #{x = y} / 2``, ``z = (U - n m / 2) / sqrt(n m (n + m + 1) / 12)``. No
    correction for ties: with them |z| comes out a little small, so a trend is claimed later, not earlier.

    Raises:
        ValueError: If either is empty.
    """
    x, y = _array(first, 1), _array(second, 1)
    n, m = len(x), len(y)
    u = np.sum(x[:, None] < y[None, :]) + 0.5 * np.sum(x[:, None] == y[None, :])
    return float((u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12))


def geometric_mean(values: Values) -> float:
    """``exp(mean(log x))``: the level of a quantity that varies by factors.

    Raises:
        ValueError: If there are no values, or one is not positive.
    """
    x = _array(values, 1)
    if np.any(x <= 0):
        raise ValueError(f"expected positive values, got a smallest of {float(x.min()):g}")
    return float(np.exp(np.mean(np.log(x))))


def largest_rise_share(values: Values) -> float:
    """Share of the largest single rise between neighbours in all rises: 1 is one step, ``1 / (n - 1)`` a straight line.

    ``max_i d_i / sum_i d_i`` with ``d_i = max(0, x_i+1 - x_i)``; 0 where nothing rises.

    Raises:
        ValueError: If there are fewer than 2 values.
    """
    rises = np.maximum(np.diff(_array(values, 2)), 0.0)
    total = float(rises.sum())
    return float(rises.max()) / total if total > 0 else 0.0


def exceedance_probability(num_before: int, num_after: int) -> float:
    """Chance that all of the last `num_after` values exceed all of the `num_before` values before them.

    For exchangeable values of any distribution every order is equally likely, so it is
    ``1 / C(num_before + num_after, num_after)``.

    Raises:
        ValueError: If a count is negative.
    """
    if num_before < 0 or num_after < 0:
        raise ValueError(f"expected counts of at least 0, got {num_before} and {num_after}")
    return 1.0 / math.comb(num_before + num_after, num_after)


def _array(values: Values, at_least: int) -> NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) < at_least:
        raise ValueError(f"expected at least {at_least} values in one dimension, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"expected finite values, got {int(np.count_nonzero(~np.isfinite(x)))} that are not")
    return x
