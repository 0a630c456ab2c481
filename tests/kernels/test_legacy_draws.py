"""The draws of NumPy's legacy stream, one after another, against NumPy's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.kernels import _native, available_levels

RANDOM, RANDINT, GEOMETRIC, CHOICE, SHUFFLE = range(5)


def with_numpy(seed, draws, weights):
    random = np.random.RandomState(seed)
    found = []
    for kind, argument in draws:
        if kind == SHUFFLE:
            numbers = list(range(int(argument)))
            random.shuffle(numbers)
            found.append(sum(at * number for at, number in enumerate(numbers)))
        else:
            draw = {
                RANDOM: random.random,
                RANDINT: lambda: random.randint(0, int(argument)),  # noqa: B023  called at once
                GEOMETRIC: lambda: random.geometric(argument),  # noqa: B023
                CHOICE: lambda: random.choice(len(weights), p=weights),
            }
            found.append(draw[kind]())
    return found


DRAW = st.one_of(
    st.tuples(st.just(RANDOM), st.just(0.0)),
    st.tuples(st.just(RANDINT), st.one_of(st.integers(1, 40), st.integers(1, 2**32 - 1)).map(float)),
    st.tuples(st.just(GEOMETRIC), st.sampled_from([0.2, 0.01, 0.33])),
    st.tuples(st.just(CHOICE), st.just(0.0)),
    st.tuples(st.just(SHUFFLE), st.integers(0, 1500).map(float)),
)


@pytest.mark.parametrize("level", range(len(available_levels())))
@given(
    seed=st.integers(0, 2**32 - 1),
    draws=st.lists(DRAW, min_size=1, max_size=60),
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=12),
)
def test_every_draw_is_numpys(level, seed, draws, weights):
    shares = np.array(weights) / np.sum(weights)
    shares /= shares.sum()
    kinds, arguments = (np.array(column) for column in zip(*draws, strict=True))
    cumulative = shares.cumsum()
    results = np.zeros(len(draws))
    _native.legacy_draws(seed, kinds.astype(np.uint8), arguments, cumulative / cumulative[-1], results, level)
    assert results.tolist() == with_numpy(seed, draws, shares)
