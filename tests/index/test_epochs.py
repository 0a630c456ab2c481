import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError, PlanError
from trackbed.index.epochs import plan_epochs

REQUESTS = {
    "tokens_per_epoch": st.integers(1, 5000),
    "num_samples": st.none() | st.integers(0, 500),
    "sequence_length": st.integers(1, 200),
    "extra_token": st.integers(0, 1),
}


@given(**REQUESTS)
def test_epochs_are_the_fewest_that_hold_the_samples(tokens_per_epoch, num_samples, sequence_length, extra_token):
    plan = plan_epochs(
        tokens_per_epoch,
        num_samples=num_samples,
        sequence_length=sequence_length,
        extra_token=extra_token,
        keep_partial=False,
    )
    assert plan.num_samples >= (num_samples or 0)
    if plan.num_epochs > 1:
        wanted = num_samples * sequence_length + extra_token
        assert (plan.num_epochs - 1) * tokens_per_epoch < wanted <= plan.num_epochs * tokens_per_epoch


@given(**REQUESTS)
def test_a_separate_last_epoch_is_one_of_which_little_is_wanted(
    tokens_per_epoch, num_samples, sequence_length, extra_token
):
    plan = plan_epochs(
        tokens_per_epoch,
        num_samples=num_samples,
        sequence_length=sequence_length,
        extra_token=extra_token,
        keep_partial=False,
    )
    if plan.samples_before_last is not None:
        per_epoch = (tokens_per_epoch - extra_token) // sequence_length
        assert plan.num_epochs > 1
        assert 0 <= num_samples - plan.samples_before_last < int(0.8 * per_epoch)


def test_a_partial_sample_is_counted_in_single_precision_as_megatron_core_does():
    # 3,028 documents of 1,000,003 tokens: exactly 739,261 samples of 4,096 tokens, of which float32 loses one.
    plan = plan_epochs(3028 * 1_000_003, num_samples=None, sequence_length=4096, extra_token=1, keep_partial=True)
    assert plan.num_samples == 739_260


def test_no_tokens_give_no_samples():
    plan = plan_epochs(0, num_samples=None, sequence_length=8, extra_token=1, keep_partial=True)
    assert (plan.num_epochs, plan.num_samples) == (1, 0)


def test_samples_from_no_tokens_are_an_error_where_megatron_core_hangs():
    with pytest.raises(PlanError, match="must have tokens to give 3 samples"):
        plan_epochs(0, num_samples=3, sequence_length=8, extra_token=1, keep_partial=False)


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ArgumentError, match="sequence_length at least 1"):
        plan_epochs(10, num_samples=1, sequence_length=0, extra_token=1, keep_partial=False)
