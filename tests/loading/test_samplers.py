import copy
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.blends import build, gpt_config, tokens_of, write_pair, write_pairs
from trackbed.errors import ArgumentError
from trackbed.loading import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from trackbed.loading.position import CountedBatches


class Sized:
    """A dataset that has only a fingerprint."""

    fingerprint = "abc"


def sequential(*, total=100, consumed=0, batch=2, rank=0, ranks=1, fingerprint="abc", **options):
    return MegatronPretrainingSampler(total, consumed, batch, rank, ranks, fingerprint=fingerprint, **options)


def random(*, total=100, consumed=0, batch=2, rank=0, ranks=1, sharding=False, dataset=Sized, **options):
    return MegatronPretrainingRandomSampler(dataset, total, consumed, batch, rank, ranks, sharding, **options)


def together(samplers):
    """The samples of all ranks, step by step."""
    return [sum(step, []) for step in zip(*samplers, strict=True)]


@given(st.integers(1, 200), st.data(), st.integers(1, 5), st.integers(1, 4))
def test_ranks_together_read_the_dataset_in_order(total, data, batch, ranks):
    consumed = data.draw(st.integers(0, total - 1))
    steps = together(
        [sequential(total=total, consumed=consumed, batch=batch, rank=r, ranks=ranks) for r in range(ranks)]
    )
    read = sum(steps, [])
    assert read == list(range(consumed, consumed + len(read)))
    assert all(len(step) == batch * ranks for step in steps)
    assert total - consumed - len(read) < batch * ranks


def test_an_incomplete_last_step_can_be_kept():
    steps = together([sequential(total=9, batch=2, rank=rank, ranks=2, drop_last=False) for rank in range(2)])
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"total": 0}, "must be at least 1, found 0, 2 and 1"),
        ({"batch": 0}, "must be at least 1, found 100, 0 and 1"),
        ({"consumed": 100}, "consumed_samples must be in"),
        ({"rank": 1}, r"data_parallel_rank must be in \[0, 1\), found 1"),
    ],
)
def test_arguments_out_of_range_are_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        sequential(**options)


@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.data())
def test_a_random_order_is_megatrons(total, batch, ranks, epoch, sharding, data):
    """Compares with the rule of the specification, written out."""
    m = batch * ranks
    if total < m:
        return
    active = total - total % m
    place = data.draw(st.integers(0, active // m - 1)) * m
    for rank in range(ranks):
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if sharding:
            part = total // m * batch
            order = [rank * part + k for k in torch.randperm(part, generator=generator).tolist()[place // ranks :]]
        else:
            whole = total // batch * batch
            order = torch.randperm(whole, generator=generator).tolist()[place:][rank::ranks]
        wanted = [order[at : at + batch] for at in range(0, len(order) - batch + 1, batch)]
        sampler = random(
            total=total, consumed=epoch * active + place, batch=batch, rank=rank, ranks=ranks, sharding=sharding
        )
        assert list(sampler) == wanted
        assert sampler.consumed_samples == epoch * active + place + len(wanted) * m


def endless(sampler):
    while True:
        yield from sampler


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 30))
def test_with_drop_last_a_resumed_run_has_the_batches_of_one_that_was_not_interrupted(
    total, batch, ranks, sharding, done
):
    if total < batch * ranks:
        return

    def steps(consumed, count):
        options = {"total": total, "batch": batch, "ranks": ranks, "sharding": sharding, "drop_last": True}
        samplers = [endless(random(consumed=consumed, rank=rank, **options)) for rank in range(ranks)]
        return [[next(sampler) for sampler in samplers] for _ in range(count)]

    whole = steps(0, done + 8)
    assert whole[done:] == steps(done * batch * ranks, 8)
    assert all(len(set(sum(step, []))) == batch * ranks for step in whole)
    per_epoch = total // (batch * ranks)
    for first in range(0, len(whole) - per_epoch + 1, per_epoch):
        read = [sample for step in whole[first : first + per_epoch] for rank in step for sample in rank]
        assert len(set(read)) == len(read) == total - total % (batch * ranks)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_with_drop_last_an_epoch_is_the_beginning_of_megatrons(total, batch, ranks, sharding):
    if total < batch * ranks:
        return
    for rank in range(ranks):
        options = {"total": total, "batch": batch, "rank": rank, "ranks": ranks, "sharding": sharding}
        assert list(random(**options, drop_last=True)) == list(random(**options))[: total // (batch * ranks)]


def test_with_drop_last_each_epoch_leaves_out_other_samples():
    samplers = [random(total=10, rank=rank, ranks=3, drop_last=True) for rank in range(3)]
    left_out = {tuple(sorted({*range(10)} - {*sum(sum(map(list, samplers), []), [])})) for _ in range(8)}
    assert len(left_out) > 1
    assert all(len(one) == 4 for one in left_out)


def test_a_position_with_drop_last_resumes_with_it_where_samples_are_left_over():
    state = random(total=10, ranks=3, drop_last=True).state_dict()
    random(total=10, ranks=3, drop_last=True).load_state_dict(state)
    with pytest.raises(ArgumentError, match="only with the saved order 'random, drop_last', found 'random'"):
        random(total=10, ranks=3).load_state_dict(state)
    with pytest.raises(ArgumentError, match="only with the saved order 'random', found 'random, drop_last'"):
        random(total=10, ranks=3, drop_last=True).load_state_dict(random(total=10, ranks=3).state_dict())
    random(total=12, ranks=3, drop_last=True).load_state_dict(random(total=12, ranks=3).state_dict())


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_drop_last_must_be_true_or_false(value):
    with pytest.raises(ArgumentError, match=f"drop_last must be True or False, found {value!r}"):
        random(drop_last=value)


def test_iterating_a_random_order_again_begins_the_next_epoch():
    sampler = random(total=10, batch=2)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(10))


def test_a_dataset_receives_the_epoch():
    class Receiving(Sized):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    dataset = Receiving()
    next(iter(random(total=10, consumed=20, dataset=dataset)))
    assert dataset.epoch == 2


def test_a_position_inside_a_step_is_refused():
    with pytest.raises(ArgumentError, match="a multiple of 4 within an epoch of 100 samples, found 6"):
        random(consumed=6, ranks=2)


def test_a_dataset_smaller_than_a_step_is_refused():
    with pytest.raises(ArgumentError, match="total_samples must be at least 4"):
        random(total=3, ranks=2)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10))
def test_a_run_goes_on_at_the_same_sample_on_any_number_of_ranks(batch, old, new, steps):
    first = [sequential(total=1000, batch=batch, rank=rank, ranks=old) for rank in range(old)]
    iterators = [iter(sampler) for sampler in first]
    read = [sample for _ in range(steps) for iterator in iterators for sample in next(iterator)]
    states = [sampler.state_dict() for sampler in first]
    assert all(state == states[0] for state in states)
    resumed = [sequential(total=1000, batch=batch, rank=rank, ranks=new) for rank in range(new)]
    for sampler in resumed:
        sampler.load_state_dict(states[0])
    assert read + sum(together(resumed), []) == list(range(len(read) + sum(map(len, together(resumed)))))


def test_a_random_order_goes_on_at_the_same_sample():
    whole = list(random())
    sampler = random()
    iterator = iter(sampler)
    read = [next(iterator) for _ in range(7)]
    resumed = random()
    resumed.load_state_dict(sampler.state_dict())
    assert read + list(resumed) == whole


def test_a_random_order_goes_on_with_another_number_of_ranks_within_its_epoch():
    whole = sum(together([random(total=96, rank=rank, ranks=2) for rank in range(2)]), [])
    resumed = [random(total=96, batch=1, rank=rank, ranks=4) for rank in range(4)]
    for sampler in resumed:
        sampler.load_state_dict(random(total=96, ranks=2).state_dict(consumed_samples=48))
    assert sorted(sum(together(resumed), [])) == sorted(whole[48:])


def test_prefetched_samples_do_not_count_if_the_run_gives_its_consumed_samples():
    sampler = sequential()
    iterator = iter(sampler)
    for _ in range(5):
        next(iterator)
    assert sampler.state_dict()["consumed_samples"] == 10
    assert sampler.state_dict(consumed_samples=4)["consumed_samples"] == 4


def test_the_size_of_a_global_batch_may_change_on_the_way():
    sampler = sequential(batch=2)
    iterator, read = iter(sampler), []
    for micro_batches in (1, 1, 2, 4):
        read += [sample for _ in range(micro_batches) for sample in next(iterator)]
    assert read == list(range(16))
    assert sampler.state_dict()["consumed_samples"] == 16


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"fingerprint": "other"}, "the saved fingerprint 'other', found 'abc'"),
        ({"total_samples": 5}, "the saved total_samples 5, found 100"),
        ({"order": "random"}, "the saved order 'random', found 'sequential'"),
        ({"version": 2}, "must have version 1, found 2"),
    ],
)
def test_a_state_of_something_else_is_refused_with_both_values(state, words):
    with pytest.raises(ArgumentError, match=words):
        sequential().load_state_dict({**sequential().state_dict(), **state})


def test_an_order_that_depends_on_the_number_of_ranks_keeps_it():
    state = random(ranks=2, sharding=True).state_dict()
    with pytest.raises(ArgumentError, match="saved data_parallel_size 2, found 1"):
        random(sharding=True).load_state_dict(state)


def test_epochs_of_another_length_are_refused_once_the_first_is_over():
    state = random(total=10, batch=1, ranks=3).state_dict(consumed_samples=9)
    with pytest.raises(ArgumentError, match="saved samples_per_epoch 9, found 10"):
        random(total=10, batch=1, ranks=2).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_reads_a_blend_in_the_samplers_order(tmp_path, num_workers):
    dataset = build(gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), [3, 2, 1]), split="8,1,1"))[0]
    sampler = MegatronPretrainingSampler(len(dataset), 6, 3, 1, 2, fingerprint=dataset.fingerprint)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
    found = [batch["tokens"].tolist() for batch in loader]
    assert found == [tokens_of(dataset, positions) for positions in sampler]


def test_a_random_order_refuses_a_micro_batch_that_changes_the_permutation():
    state = random(total=100, batch=3, ranks=4).state_dict(consumed_samples=48)
    with pytest.raises(ArgumentError, match="the saved permuted 99, found 100"):
        random(total=100, batch=4, ranks=3).load_state_dict(state)


@pytest.mark.parametrize("consumed", [-4, None, "7"])
def test_a_state_without_a_position_is_refused(consumed):
    with pytest.raises(ArgumentError, match=re.escape(f"consumed_samples in [0, 2**62), found {consumed!r}")):
        sequential().load_state_dict({**sequential().state_dict(), "consumed_samples": consumed})


def test_a_position_beyond_the_dataset_is_refused():
    with pytest.raises(ArgumentError, match=r"consumed_samples must be in \[0, 100\], found 999"):
        sequential().load_state_dict({**sequential().state_dict(), "consumed_samples": 999})


@pytest.mark.parametrize("state", [[], None, "text", 5])
def test_a_state_that_is_no_mapping_is_refused(state):
    for one in (
        MegatronPretrainingSampler(10, 0, 1, 0, 1),
        MegatronPretrainingRandomSampler(range(10), 10, 0, 1, 0, 1, data_sharding=False),
        CountedBatches([[0], [1]]),
    ):
        with pytest.raises(ArgumentError, match="a state must be a mapping"):
            one.load_state_dict(state)


@pytest.mark.parametrize("order", ["megatron", "instant"])
def test_a_sampler_can_be_pickled_with_the_checksum_of_its_data(tmp_path, order):
    prefix = write_pair(tmp_path / "pair", [9] * 300)
    train = build(gpt_config(tmp_path / "cache", blend=([prefix], None), split="1", order=order), (40, None, None))[0]
    sampler = MegatronPretrainingSampler(len(train), 0, 4, 0, 1, fingerprint=train.fingerprint)
    sampler.state_dict()
    for copied in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        assert copied.state_dict() == sampler.state_dict()
        assert next(iter(copied)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("samples_per_epoch", value) for value in ("x", b"x", -1, True, 1.5, 10**30)],
        *[("consumed_samples", value) for value in (True, 10**30, -1, "1", None)],
    ],
)
def test_a_state_with_odd_numbers_is_refused(tmp_path, name, value):
    prefix = write_pair(tmp_path / "pair", [9] * 300)
    train = build(gpt_config(tmp_path / "cache", blend=([prefix], None), split="1"), (40, None, None))[0]
    for sampler in (
        MegatronPretrainingSampler(len(train), 0, 4, 0, 1, fingerprint=train.fingerprint),
        MegatronPretrainingRandomSampler(train, len(train), 0, 4, 0, 1, data_sharding=False),
    ):
        with pytest.raises(ArgumentError, match=name):
            sampler.load_state_dict({**sampler.state_dict(), name: value})
