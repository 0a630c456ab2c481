"""Hypothesis for a length of time rather than a number of examples."""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

SECONDS = float(os.environ.get("TRACKBED_FUZZ_SECONDS", "20"))
FULL_SECONDS = 600.0
_EXAMPLES = 100  # between two looks at the clock


def for_seconds(num_targets: int) -> pytest.MarkDecorator:
    """Gives a test its `seconds`, where a file has `num_targets`: a few in the normal tier, minutes if slow."""
    return pytest.mark.parametrize(
        "seconds",
        [
            pytest.param(SECONDS / 3 / num_targets, id="some"),  # there are at most three such files
            pytest.param(FULL_SECONDS / num_targets, id="many", marks=pytest.mark.slow),
        ],
    )


def fuzz(strategy: SearchStrategy[Any], check: Callable[[Any], None], *, seconds: float) -> int:
    """Call `check` with examples until the time is over, and say with how many."""
    stop = time.monotonic() + seconds
    count = 0

    def counted(example: Any) -> None:
        nonlocal count
        count += 1
        check(example)

    turns = itertools.count()
    while time.monotonic() < stop:
        run = given(strategy)(lambda example: counted(example))
        run = settings(
            max_examples=_EXAMPLES,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )(run)
        seed(next(turns))(run)()
    return count
