"""One statistic of one shuffle, and whether a random permutation would show it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from quality.quantiles import gamma_quantiles, normal_quantiles, poisson_quantiles


class Law(Enum):
    """How a statistic is distributed for random permutations."""

    NORMAL = "normal"
    GAMMA = "gamma"
    """Sums of chi-squares, with the exact mean and variance."""
    POISSON = "Poisson"
    """Counts; the variance is the mean."""
    FIXED = "fixed"
    """Exactly the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """What was found, and what random permutations give."""

    size: int
    """Of the permutations."""
    name: str
    value: float
    mean: float
    variance: float = 0.0
    law: Law

    @property
    def deviation(self) -> float:
        """How far the value is from the mean, in standard deviations."""
        off = self.value - self.mean
        spread = math.sqrt(self.mean if self.law is Law.POISSON else self.variance)
        return off / spread if spread else math.copysign(math.inf, off) if off else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A statistic and its limits."""

    statistic: Statistic
    lowest: float
    highest: float

    @property
    def holds(self) -> bool:
        """Whether the statistic is within its limits."""
        return self.lowest <= self.statistic.value <= self.highest


def judge(statistics: Iterable[Statistic], *, false_alarms: float) -> list[Verdict]:
    """The limits of each statistic, such that random permutations break one of them with this probability at most.

    The probability is divided evenly among all statistics and both sides of each (Bonferroni), so that it does not
    matter how they depend on each other.
    """
    statistics = list(statistics)
    tail = false_alarms / max(2 * len(statistics), 1)
    return [Verdict(statistic, *_limits(statistic, tail)) for statistic in statistics]


def _limits(statistic: Statistic, tail: float) -> tuple[float, float]:
    match statistic.law:
        case Law.NORMAL:
            return normal_quantiles(statistic.mean, statistic.variance, tail)
        case Law.GAMMA:
            return gamma_quantiles(statistic.mean, statistic.variance, tail)
        case Law.POISSON:
            return poisson_quantiles(statistic.mean, tail)
        case Law.FIXED:
            return statistic.mean, statistic.mean
