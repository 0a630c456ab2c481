"""Columns of numbers, and the points of a line."""

import math

import numpy as np
import pytest

from trackbed.report.columns import MOST_POINTS, as_number, bins_of, column, curve, floats, numeric_keys, steps_of


def test_a_short_line_shows_every_value_and_its_gaps():
    steps = np.arange(1, 11)
    values = np.array([5.0, np.nan, 4, 3, 2, 1, np.nan, 7, 8, 9])
    found = curve(steps, values)
    assert found.low is None
    np.testing.assert_array_equal(found.x, steps)
    np.testing.assert_array_equal(found.mean, values)
    assert (found.num_values, found.num_unknown) == (8, 2)
    assert (found.first.step, found.first.value, found.last.value) == (1, 5.0, 9.0)
    assert (found.lowest.step, found.highest.step) == (6, 10)
    assert curve(steps, np.full(10, np.nan)) is None
    assert curve(steps[:0], values[:0]) is None


def test_a_long_line_keeps_the_extremes_and_the_mean_of_each_bin():
    rng = np.random.default_rng(1)
    steps, values = np.arange(1, 100_001), rng.normal(size=100_000)
    values[54_321], values[77] = 50.0, -40.0
    found = curve(steps, values)
    assert 3 * len(found.x) <= MOST_POINTS
    assert (found.low.min(), found.high.max()) == (-40.0, 50.0)
    assert found.highest.step == 54_322
    assert ((found.low <= found.mean) & (found.mean <= found.high)).all()
    assert found.mean.mean() == pytest.approx(values.mean(), abs=1e-3)
    assert (np.diff(found.x) > 0).all()


def test_a_long_line_is_broken_where_steps_are_missing():
    steps = np.concatenate([np.arange(2_000), np.arange(50_000, 52_000)])
    found = curve(steps, np.ones(len(steps)))
    assert np.isnan(found.mean).sum() == 1


def test_values_beyond_the_largest_stay_finite_when_drawn():
    found = curve(np.arange(5_000), floats([1.7e308, -1.7e308] * 2_500))
    assert np.isfinite(found.mean).all()
    assert np.isfinite(found.high - found.low).all()


def test_only_numbers_of_json_are_numbers():
    mixed = [1, 2.5, None, True, "3", [4], {"a": 5}, math.inf, 2**63]
    np.testing.assert_array_equal(floats(mixed), [as_number(value) for value in mixed])
    np.testing.assert_array_equal(floats(mixed), [1, 2.5, *[math.nan] * 6, 2.0**63])
    np.testing.assert_array_equal(column([{"a": 1}, {}, {"a": None}], "a"), [1, math.nan, math.nan])
    assert numeric_keys([{"a": True, "b": "x"}, {"c": 1, "step": 1}], known=["step"]) == ["c"]


def test_steps_in_any_order_and_of_any_kind_have_bins():
    steps = steps_of([{"step": 9}, {"step": 2}, {"step": "x"}])
    assert steps.tolist() == [9, 2, 0]
    assert bins_of(steps, 2).tolist() == [1, 0, 0]
    assert curve(steps, np.array([1.0, 2.0, 3.0])).mean.tolist() == [3.0, 2.0, 1.0]
