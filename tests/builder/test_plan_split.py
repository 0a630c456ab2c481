import math

from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.blends import gpt_config
from trackbed.builder.plan_split import plan_shares
from trackbed.index import normalize

WEIGHTS = st.lists(st.floats(0.001, 100), min_size=1, max_size=12).map(normalize)


@given(WEIGHTS, st.integers(0, 10**6))
def test_the_sizes_of_core_0_16_round_each_share_up_and_then_add_the_surplus(weights, size):
    total, drawn, per_dataset = plan_shares(weights, size, gpt_config(None))
    targets = [math.ceil(size * weight) for weight in weights]
    assert total == sum(targets) >= size - 1
    assert drawn == weights
    assert per_dataset == [math.ceil(target * 1.005) for target in targets]


@given(WEIGHTS, st.integers(1, 10**6))
def test_the_sizes_of_core_0_10_hold_the_surplus_in_the_blend_too(weights, size):
    total, drawn, per_dataset = plan_shares(weights, size, gpt_config(None, renormalize_blend_weights=False))
    renormalized = plan_shares(weights, size, gpt_config(None, renormalize_blend_weights=True))
    assert per_dataset == [math.ceil(size * weight * 1.005) for weight in weights]
    assert total == sum(per_dataset)
    assert drawn == weights
    assert renormalized == (total, [count / total for count in per_dataset], per_dataset)


def test_nothing_asked_for_is_nothing_in_every_rule():
    for renormalize in (None, False, True):
        config = gpt_config(None, renormalize_blend_weights=renormalize)
        assert plan_shares([0.5, 0.5], 0, config) == (0, [0.5, 0.5], [0, 0])
