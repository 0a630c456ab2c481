"""How far the datasets of a blend are from their shares."""

import numpy as np

BOUND = 15 / 8
"""Proven in docs/explanation/instant.md for stages of constant weights, with shares that are rounded to 64 bits."""
RAMP_BOUND = 2 * BOUND + 1 / 2
"""The same for ramps."""


def strays(datasets, weights):
    """Largest distance of any dataset from its share at any prefix; it occurs just before or just after a draw."""
    farthest = 0.0
    shares = np.asarray(weights) / np.sum(weights)
    places = np.argsort(datasets, kind="stable")
    for dataset, its in enumerate(np.split(places, np.cumsum(np.bincount(datasets, minlength=len(shares)))[:-1])):
        numbers = np.arange(len(its) + 1)
        before = shares[dataset] * np.append(its, len(datasets)) - numbers
        after = numbers[1:] - shares[dataset] * (its + 1)
        farthest = max(farthest, before.max(), after.max(initial=0.0))
    return farthest


def strays_on_a_ramp(datasets, before, after, length):
    """Largest distance of any dataset from its share at any prefix of a ramp from some shares to others."""
    k = np.arange(len(datasets) + 1)[:, None]
    shares = before * (k - k * k / (2 * length)) + after * k * k / (2 * length)
    counts = np.zeros_like(shares)
    counts[1:] = np.cumsum(datasets[:, None] == np.arange(len(before)), axis=0)
    return np.abs(counts - shares).max()


def check_shares(stages, datasets):
    """Checks that at every prefix of a stage each dataset is within its bound.

    Args:
        stages: those of the order, with one behind each ramp.
        datasets: dataset of each sample, from 0 on.
    """
    shares = np.zeros(len(stages[0].weights))
    stops = [*(min(stage.first_sample, len(datasets)) for stage in stages[1:]), len(datasets)]
    for stage, stop in zip(stages, stops, strict=True):
        its = datasets[stage.first_sample : stop]
        before, shares = shares, np.array(stage.weights, dtype=float) / sum(stage.weights)
        if stage.ramp:
            assert strays_on_a_ramp(its, before, shares, stage.ramp) < RAMP_BOUND
            shares = before + (shares - before) * (stop - stage.first_sample) / stage.ramp
        elif len(its):
            assert strays(its, stage.weights) < BOUND
