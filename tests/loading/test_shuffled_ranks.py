"""Which rank reads which part of a step: the same samples in each step, and every dataset on every rank."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trackbed
from tests.support.files.built_pair import build
from tests.support.tiers import slow_but
from trackbed.errors import ArgumentError
from trackbed.index import InstantOrder
from trackbed.index.rank_shuffle import part_of_rank, shuffled_ranks
from trackbed.loading import MegatronPretrainingSampler

GOLDEN = [[3, 6, 7, 2, 5, 4, 1, 0], [7, 3, 4, 5, 2, 1, 6, 0], [7, 6, 3, 4, 2, 0, 5, 1]]


def sampler(rank, size, *, batch=2, total=1_000, consumed=0, **options):
    return MegatronPretrainingSampler(total, consumed, batch, rank, size, **options)


def test_golden_ranks():
    assert shuffled_ranks(8, seed=1234, position=0).tolist() == GOLDEN[0]
    assert shuffled_ranks(8, seed=1234, position=2**61).tolist() == GOLDEN[1]
    assert shuffled_ranks(8, seed=2**64 - 1, position=16).tolist() == GOLDEN[2]


@given(st.integers(1, 70), st.integers(0, 2**64 - 1), st.integers(0, 2**62))
def test_the_parts_of_the_ranks_are_a_permutation(num_ranks, seed, position):
    parts = [part_of_rank(rank, num_ranks, seed=seed, position=position) for rank in range(num_ranks)]
    assert sorted(parts) == list(range(num_ranks))
    assert parts == shuffled_ranks(num_ranks, seed=seed, position=position).tolist()


def test_all_orders_of_a_few_ranks_are_equally_likely():
    counts = np.zeros(27)
    for step in range(12_000):
        counts[shuffled_ranks(3, seed=5, position=6 * step) @ [9, 3, 1]] += 1
    found = counts[counts > 0]
    assert len(found) == 6
    assert ((found - 2_000) ** 2 / 2_000).sum() < 25  # chi-squared of 5 degrees of freedom: 1e-4


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**64 - 1), st.booleans(), st.integers(1, 200))
def test_each_step_has_the_samples_of_one_rank_in_contiguous_parts(size, batch, seed, drop_last, total):
    alone = list(sampler(0, 1, batch=batch * size, total=total, drop_last=drop_last))
    options = {"batch": batch, "total": total, "drop_last": drop_last, "rank_seed": seed}
    ranks = [list(sampler(rank, size, **options)) for rank in range(size)]
    for step, whole in enumerate(alone):
        parts = [found[step] for found in ranks]
        assert sorted(sum(parts, [])) == whole
        assert all(part == list(range(part[0], part[0] + len(part))) for part in parts if part)
    assert {len(found) for found in ranks} == {len(alone)}


def test_one_rank_reads_as_without_a_shuffle():
    assert list(sampler(0, 1, rank_seed=7)) == list(sampler(0, 1))


def test_a_position_says_that_ranks_are_shuffled_and_a_sampler_follows_it():
    shuffled, plain = sampler(1, 4, rank_seed=7), sampler(1, 4)
    batches, plain_batches = list(shuffled), list(plain)
    assert batches != plain_batches
    state, plain_state = (one.state_dict(consumed_samples=80) for one in (shuffled, plain))
    assert state.keys() == plain_state.keys()
    assert state["order"] == "sequential, ranks shuffled by seed 7"
    assert plain_state["order"] == "sequential"
    for saved, wanted in ((state, batches), (plain_state, plain_batches)):
        for fresh in (sampler(1, 4), sampler(1, 4, rank_seed=7), sampler(1, 4, rank_seed=8)):
            fresh.load_state_dict(saved)
            assert list(fresh) == wanted[10:]
            assert fresh.state_dict()["order"] == saved["order"]


SEED = "sequential, ranks shuffled by seed"


@pytest.mark.parametrize(
    "order", ["random", 5, None, *(f"{SEED} {seed}" for seed in ("-1", 2**64, "7 ", "07", "\u0667"))]
)
def test_positions_of_other_orders_are_refused(order):
    state = {**sampler(0, 2).state_dict(), "order": order}
    with pytest.raises(ArgumentError, match="a run can resume only with the saved order"):
        sampler(0, 2).load_state_dict(state)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "7"])
def test_seeds_that_are_no_seeds_are_refused(seed):
    with pytest.raises(ArgumentError, match="rank_seed must be None, or an integer"):
        sampler(0, 2, rank_seed=seed)


def shares(rank, size, batch, datasets, num_datasets, seed):
    """Samples of each dataset that a rank reads."""
    parts = np.fromiter(
        (part_of_rank(rank, size, seed=seed, position=first) for first in range(0, len(datasets), size * batch)),
        dtype=np.int64,
    )
    table = datasets.reshape(-1, size, batch)
    return np.bincount(table[np.arange(len(parts)), parts].ravel(), minlength=num_datasets)


@pytest.mark.parametrize(
    ("batch", "size"),
    slow_but([(8, 2), (5, 3), (1, 4), (2, 8), (1, 64)], itertools.product([1, 2, 5, 8], [2, 3, 4, 8, 64])),
)
def test_every_rank_reads_the_datasets_in_their_shares(size, batch):
    rng = np.random.default_rng(1000 * size + batch)
    steps = 10_000
    for weights in ([0.5, 0.3, 0.2], [0.5, 0.5], rng.random(7).tolist()):
        order = InstantOrder(sizes=[10**6] * len(weights), weights=weights, seed=3, num_samples=steps * size * batch)
        datasets = np.asarray(order.locate(np.arange(steps * size * batch))[0], dtype=np.int64)
        wanted = np.array(weights) / sum(weights) * steps * batch
        for rank in {0, 1, size - 1}:
            found = shares(rank, size, batch, datasets, len(weights), seed=3)
            chi_squared = ((found - wanted) ** 2 / wanted).sum()
            # A blend is more even than random draws, so that this is rarely even half of what chance alone gives.
            assert chi_squared < 10 + 4 * len(weights), (weights, rank, found.tolist())


BLEND = {"prefixes": {"a": 0.5, "b": 0.3, "c": 0.2}, "sequence_length": 8, "size": 400, "tokenizer": "bytes", "seed": 1}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        build(tmp_path / name, [list(range(50))] * 20, np.uint16)
    return tmp_path


def read(dataset, rank, size, **options):
    loader = trackbed.BatchLoader(dataset, batch_size=1, rank=rank, num_ranks=size, **options)
    return np.concatenate([batch["dataset_id"].numpy() for batch in loader]).tolist()


@pytest.mark.parametrize("order", ["instant", "megatron", "balanced"])
def test_loaders_shuffle_ranks_by_default_in_the_order_instant_alone(folder, order):
    train = trackbed.open_blend(**BLEND, order=order, cache="cache").train
    for rank in range(2):
        assert read(train, rank, 2) == read(train, rank, 2, shuffle_ranks=order == "instant")
    found = read(train, 1, 2)
    if order == "instant":
        assert set(found) == {0, 1, 2}
        assert set(read(train, 1, 2, shuffle_ranks=False)) != {0, 1, 2}  # as it was
    else:
        assert found != read(train, 1, 2, shuffle_ranks=True)
    assert read(train, 0, 1) == read(train, 0, 1, shuffle_ranks=False)


def test_a_loader_follows_the_position_that_it_resumes_from(folder):
    train = trackbed.open_blend(**BLEND, order="instant").train

    def loader(**options):
        return trackbed.BatchLoader(train, batch_size=2, rank=1, num_ranks=4, **options)

    for saved_with in (True, False):
        first = loader(shuffle_ranks=saved_with)
        batches = [batch["tokens"].tolist() for batch in first]
        again = loader(shuffle_ranks=saved_with)
        for _, _ in zip(range(5), again, strict=False):
            pass
        state = again.state_dict()
        for options in ({}, {"shuffle_ranks": True}, {"shuffle_ranks": False}):
            resumed = loader(**options)
            resumed.load_state_dict(state)
            assert [batch["tokens"].tolist() for batch in resumed] == batches[5:]


def test_shuffle_ranks_of_another_type_is_refused(folder):
    train = trackbed.open_blend(**BLEND, order="instant").train
    with pytest.raises(ArgumentError, match="shuffle_ranks must be True, False or None, found 'yes'"):
        trackbed.BatchLoader(train, batch_size=1, shuffle_ranks="yes")
