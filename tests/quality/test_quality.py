"""The statistical suite: its moments and limits are right, it accepts what is random and rejects what is not."""

import itertools
import logging
import warnings
from dataclasses import replace
from statistics import fmean, pvariance

import numpy as np
import pytest

from quality import __main__ as command
from quality.bijection import bijection
from quality.check import Law, Statistic, judge
from quality.inversions import count_inversions
from quality.neighbours import differences, same_block_neighbours, serial_correlation, short_steps
from quality.quantiles import gamma_quantiles, normal_quantiles, poisson_quantiles
from quality.runs import Runs
from quality.shuffles import blocks, few_rounds, grain, random, trackbed
from quality.suite import FULL, SHORT, of_sampled, of_whole, statistics
from quality.tables import batch_composition, positions

FALSE_ALARMS = command.FALSE_ALARMS


def failures(statistics):
    return [verdict.statistic for verdict in judge(statistics, false_alarms=FALSE_ALARMS) if not verdict.holds]


@pytest.fixture
def grains():
    """Grain's shuffle; importing it warns, and logs that other libraries are missing."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            grain(5, 0)
        except ImportError:
            pytest.skip("grain is not installed: pip install '.[grain]'")
        finally:
            logging.disable(logging.NOTSET)
    return grain


def test_quantiles_are_those_of_the_books():
    low, high = normal_quantiles(3, 4, 0.025)
    assert (low, high) == pytest.approx((3 - 2 * 1.959964, 3 + 2 * 1.959964), rel=1e-6)
    for degrees, below, above in ((1, 1.5708e-6, 10.8276), (63, 33.9058, 103.4424), (1_000, 867.4791, 1_143.9171)):
        found = gamma_quantiles(degrees, 2 * degrees, 0.001)
        assert found == pytest.approx((below, above), rel=1e-5)
    # P(count > 16) = 0.0270 and P(count > 20) = 0.0016 for a mean of 10; P(count < 3) = 0.0028.
    assert poisson_quantiles(10, 0.003) == (3, 20)
    # One side of the border between both ways to compute them.
    inside, outside = gamma_quantiles(9_999, 9_999, 1e-9), gamma_quantiles(10_001, 10_001, 1e-9)
    assert np.subtract(outside, inside) == pytest.approx([2, 2], abs=0.1)


@pytest.mark.parametrize(
    "statistic",
    [
        lambda runs: batch_composition(runs, batch=2),
        same_block_neighbours,
        serial_correlation,
        lambda runs: serial_correlation(runs, lag=3),
    ],
)
def test_means_and_variances_are_those_of_all_permutations(statistic):
    every = [np.array([images]) for images in itertools.permutations(range(8))]
    found = [statistic([Runs(images, 8, is_whole=True)]) for images in every]
    values = [each.value for each in found]
    assert fmean(values) == pytest.approx(found[0].mean, rel=1e-9)
    assert pvariance(values) == pytest.approx(found[0].variance, rel=1e-9)


def test_inversions_are_counted():
    rng = np.random.default_rng(1)
    for length in (1, 2, 3, 7, 8, 9, 33):
        images = np.stack([rng.permutation(length) for _ in range(20)]) * 5
        wanted = [sum(a > b for a, b in itertools.combinations(row, 2)) for row in images.tolist()]
        assert count_inversions(images).tolist() == wanted


@pytest.mark.parametrize("statistic", [positions, differences, short_steps])
def test_pooled_counts_have_the_mean_that_is_said(statistic):
    images = np.stack([np.random.default_rng(seed).permutation(100) for seed in range(4_000)])
    found = [statistic([Runs(some, 100, is_whole=True)]) for some in np.split(images, 200)]
    error = (pvariance([each.value for each in found]) / len(found)) ** 0.5
    assert fmean([each.value for each in found]) == pytest.approx(found[0].mean, abs=5 * error)


def test_limits_are_wider_the_more_statistics_there_are():
    one = Statistic(size=5, name="", value=4.0, mean=0, variance=1, law=Law.NORMAL)
    assert not judge([one], false_alarms=1e-3)[0].holds
    assert all(verdict.holds for verdict in judge([one] * 1_000, false_alarms=1e-3))


def test_what_is_random_passes():
    plan = replace(SHORT, sampled=())
    assert failures(statistics(random, plan)) == []


def test_trackbeds_permutation_passes_the_short_suite():
    assert failures(statistics(trackbed, SHORT)) == []


@pytest.mark.slow
def test_trackbeds_permutation_passes_the_full_suite():
    assert failures(statistics(trackbed, FULL)) == []


@pytest.mark.parametrize("size", [100, 1_000, 10_000])
def test_two_rounds_are_rejected(size):
    assert failures(of_whole(few_rounds(2), size, 20)) != []


@pytest.mark.parametrize("size", [1_000, 10_000])
def test_four_rounds_are_rejected(size):
    assert failures(of_whole(few_rounds(4), size, 100)) != []


@pytest.mark.parametrize("size", SHORT.sampled)
def test_two_rounds_are_rejected_at_large_sizes(size):
    assert failures(of_sampled(few_rounds(2), size, SHORT)) != []


def test_a_network_on_a_grid_with_odd_sides_would_be_rejected():
    def even(size, seed):
        images = random(size, seed)(np.arange(size))
        if count_inversions(images[None, :])[0] % 2:
            images[[0, 1]] = images[[1, 0]]
        return images.__getitem__

    assert [statistic.name for statistic in failures(of_whole(even, 25, 200))] == ["odd permutations"]


@pytest.mark.parametrize("size", [2**30, 10**9 + 7])
def test_grains_shuffle_is_rejected(grains, size):
    names = {statistic.name for statistic in failures(of_sampled(grains, size, SHORT, seed_bits=32))}
    assert {"same-block neighbours", "batch composition", "differences, lag 1"} <= names


def test_grains_shuffle_is_not_a_bijection_at_65537(grains):
    assert bijection(grains, [65_537], seed=1).value == 1


def test_blocks_without_windows_are_rejected():
    names = {statistic.name for statistic in failures(of_sampled(blocks(block=64, window=1), 2**30, SHORT))}
    assert "same-block neighbours" in names


def test_the_command_prints_a_table_and_says_what_failed(monkeypatch, capsys):
    small = replace(SHORT, whole=((100, 50),), sampled=(), every_size_up_to=20, around_powers_up_to=20)
    monkeypatch.setattr(command, "SHORT", small)
    monkeypatch.setattr("sys.argv", ["quality", "--short"])
    assert command.main() == 0
    assert "| 100 | same-block neighbours |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["quality", "--short", "--shuffle", "two-rounds"])
    assert command.main() == 1
    assert "| FAILED |" in capsys.readouterr().out
