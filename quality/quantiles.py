"""Quantiles of the normal, gamma and Poisson distributions, far out in their tails.

The incomplete gamma function is summed as a series below its mean and as a continued fraction above it. For shapes
from 10,000 on, Wilson and Hilferty's cube (1931) is off by less than a ten thousandth of a standard deviation per
standard deviation.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Final

_LARGE_SHAPE: Final = 10_000


def normal_quantiles(mean: float, variance: float, tail: float) -> tuple[float, float]:
    """What a normal variable stays above, and below, but for a probability of `tail` each."""
    reach = NormalDist().inv_cdf(1 - tail) * math.sqrt(variance)
    return mean - reach, mean + reach


def gamma_quantiles(mean: float, variance: float, tail: float) -> tuple[float, float]:
    """The same for a gamma variable of this mean and variance: a chi-square one where `variance == 2 * mean`.

    >>> [round(quantile, 2) for quantile in gamma_quantiles(10, 20, 0.05)]
    [3.94, 18.31]
    """
    shape, scale = mean * mean / variance, variance / mean
    if shape >= _LARGE_SHAPE:
        reach = NormalDist().inv_cdf(1 - tail) / math.sqrt(9 * shape)
        centre = 1 - 1 / (9 * shape)
        return mean * (centre - reach) ** 3, mean * (centre + reach) ** 3
    below = _where(lambda x: _tails(shape, x)[0] >= tail, shape)
    above = _where(lambda x: _tails(shape, x)[1] <= tail, shape)
    return below * scale, above * scale


def poisson_quantiles(mean: float, tail: float) -> tuple[int, int]:
    """The lowest and the highest count that a Poisson variable takes, but for a probability of `tail` each.

    >>> poisson_quantiles(0.5, 1e-3)
    (0, 4)
    """
    highest = math.ceil(mean)
    while _tails(highest + 1, mean)[0] > tail:  # P(count > highest)
        highest += 1
    lowest = math.floor(mean)
    while lowest > 0 and _tails(lowest, mean)[1] > tail:  # P(count < lowest)
        lowest -= 1
    return lowest, highest


def _where(holds: Callable[[float], bool], start: float) -> float:
    """The point from which a condition holds, by bisection."""
    low, high = 0.0, start
    while not holds(high):
        low, high = high, 2 * high + 1
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _tails(shape: float, x: float) -> tuple[float, float]:
    """P(G <= x) and P(G > x) for a gamma variable of scale 1."""
    if x <= 0:
        return 0.0, 1.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        step = shape
        while term > total * 1e-17:
            step += 1
            term *= x / step
            total += term
        return front * total, 1 - front * total
    # Lentz's way through the continued fraction.
    b = x + 1 - shape
    c, d = 1e300, 1 / b
    fraction, number, factor = d, 0, 0.0
    while abs(factor - 1) > 1e-15:
        number += 1
        a = -number * (number - shape)
        b += 2
        d = 1 / (a * d + b)
        c = b + a / c
        factor = d * c
        fraction *= factor
    return 1 - front * fraction, front * fraction
