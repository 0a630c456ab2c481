"""Balanced steps: the samples of each global batch, packs of equal cost for every rank, and positions inside one."""

import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trackbed
from tests.datasets.test_packed import packed, write
from tests.support.tiers import slow_but
from trackbed.errors import ArgumentError
from trackbed.index.pack_costs import CostTables
from trackbed.index.packing import Packs
from trackbed.index.rank_shuffle import part_of_rank
from trackbed.kernels.pack_balance import deal_packs
from trackbed.kernels.packing import PackShape
from trackbed.kernels.reference import deal_packs as deal_one_by_one
from trackbed.loading import BatchStream, MegatronPretrainingSampler
from trackbed.loading.balanced_sampler import StepCosts
from trackbed.loading.loader import samples_of

HIDDEN = 4


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    generator = np.random.default_rng(3)
    lengths = [generator.integers(0, most, 200) for most in (12, 40, 90)]
    return [write(folder / f"p{number}", one, seed=number) for number, one in enumerate(lengths)]


@pytest.fixture(scope="module")
def data(prefixes):
    """240 packs of three datasets."""
    return packed(None, prefixes, sizes=(240, 0, 0), sequence_length=32)


def sampler(data, rank=0, size=1, *, batch=1, whole=24, hidden=HIDDEN, **options):
    sizes = {"global_batch_size": whole, "micro_batch_size": batch, "hidden_size": hidden}
    return trackbed.BalancedSampler(data, rank=rank, num_ranks=size, **sizes, **options)


def cost_of(data, position, hidden=HIDDEN):
    """Cost of a pack by the lengths of its documents."""
    padded, logical = data[position]["cu_seqlens_padded"].diff(), data[position]["cu_seqlens"].diff()
    segments = padded[logical > 0].tolist()  # the rest of a pack has no places of its own
    return sum(12 * hidden * n + n * n for n in segments)


@pytest.mark.parametrize("options", [{}, {"pack_window": 50}, {"pack_multiple": 4}, {"pack_long": "cut"}])
@pytest.mark.parametrize("count", [1, 3])
def test_costs_are_those_of_the_documents_in_a_pack(prefixes, count, options):
    data = packed(None, prefixes[-count:], sizes=(120, 0, 0), sequence_length=32, **options)
    positions = np.arange(0, 120, 3)
    found = StepCosts(data, hidden_size=HIDDEN).find(positions)
    assert found.tolist() == [cost_of(data, position) for position in positions.tolist()]


def test_datasets_without_packs_cost_nothing(prefixes, tmp_path):
    empty = write(tmp_path / "empty", [1, 1, 0])
    data = packed(None, [prefixes[0], empty, prefixes[2]], weights=[1, 0, 2], sequence_length=32)
    found = StepCosts(data, hidden_size=HIDDEN).find(np.arange(60))
    assert found.tolist() == [cost_of(data, position) for position in range(60)]


@given(st.integers(1, 7), st.integers(0, 6), st.data())
def test_the_kernel_deals_as_the_reference(num_ranks, turns, draw):
    size = num_ranks * turns
    costs = draw.draw(st.lists(st.integers(0, 5) | st.integers(0, 2**50), min_size=size, max_size=size))
    found = deal_packs(np.array(costs, dtype=np.int64), num_ranks)
    assert found.T.tolist() == deal_one_by_one(costs, num_ranks)
    if turns:
        in_order = sorted(costs, reverse=True)
        widest = max(in_order[k] - in_order[k + num_ranks - 1] for k in range(0, size, num_ranks))
        loads = [sum(costs[number] for number in own) for own in found.T.tolist()]
        assert max(loads) - min(loads) <= widest


@pytest.mark.parametrize(
    ("costs", "num_ranks", "words"),
    [
        ([1, 2, 3], 2, "num_ranks must divide the number of packs, 3, found 2"),
        ([1], 0, "num_ranks must be a whole number of at least 1"),
        ([-1], 1, "costs must be at least 0"),
        ([2**62, 2**62], 1, "of a rank below 2\\*\\*63"),
    ],
)
def test_costs_that_cannot_be_dealt_are_refused(costs, num_ranks, words):
    with pytest.raises(ArgumentError, match=words):
        deal_packs(np.array(costs, dtype=np.int64), num_ranks)


@settings(max_examples=30)
@given(st.sampled_from([(1, 24), (2, 3), (3, 4), (8, 1), (24, 1)]), st.integers(0, 100), st.booleans())
def test_each_global_batch_has_the_samples_that_follow_and_each_rank_its_part(data, sizes, first, skips):
    size, batch = sizes
    skip = [[first + 3, first + 9], [150, 151]] if skips else []
    options = {"batch": batch, "consumed_samples": first, "skip": skip}
    ranks = [list(sampler(data, rank, size, **options)) for rank in range(size)]
    kept = [one for one in range(first, 240) if not any(start <= one <= stop for start, stop in skip)]
    micro = 24 // (size * batch)
    assert {len(own) for own in ranks} == {len(kept) // 24 * micro}
    costs = [cost_of(data, position) for position in range(240)]
    for number, begin in enumerate(range(0, len(kept) // 24 * 24, 24)):
        whole = kept[begin : begin + 24]
        dealt = deal_one_by_one([costs[position] for position in whole], size)
        for rank, own in enumerate(ranks):
            part = part_of_rank(rank, size, seed=data.config.random_seed, position=whole[0])
            found = list(itertools.chain(*own[number * micro : (number + 1) * micro]))
            assert found == [whole[place] for place in dealt[part]]


def test_a_pass_that_has_ended_is_followed_by_a_whole_one(data):
    own = sampler(data, 1, 4, consumed_samples=100)
    found = [list(own), list(own)]
    assert [len(batches) for batches in found] == [5 * 6, 10 * 6]
    assert found[1] == list(sampler(data, 1, 4))


def read(data, state, size, batch, **options):
    """Steps of what is left of a run from a state on, one list of all ranks' samples a micro-batch."""
    ranks = []
    for rank in range(size):
        own = sampler(data, rank, size, batch=batch, **options)
        own.load_state_dict(state)
        ranks.append(list(own))
    return [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


SIZES = [(1, 1), (2, 1), (3, 2), (4, 3), (6, 1), (12, 1), (8, 3), (2, 12)]


@pytest.mark.parametrize("case", slow_but([5, 23, 61], range(100)))
def test_a_run_resumes_inside_a_global_batch_on_any_ranks_that_fit(data, case):
    rng = random.Random(case)
    size, batch = rng.choice(SIZES)
    skip = [[7, 9], [30, 40]] if rng.random() < 0.5 else []
    stream = BatchStream(data, sampler(data, 0, size, batch=batch, skip=skip), ahead=rng.choice([1, 3]))
    steps = rng.randrange(1, 72 // (size * batch) + 1)
    for _ in itertools.islice(stream, steps):
        pass
    state = stream.state_dict()
    num_read = steps * size * batch
    whole = sampler(data, 0, 1, batch=1, skip=skip)
    rest = list(itertools.chain(*whole))[num_read:]  # one rank reads in the order of the turns
    for other_size, other_batch in SIZES:
        step = other_size * other_batch
        if num_read % 24 % step:
            with pytest.raises(ArgumentError, match="only where they are a multiple of micro_batch_size"):
                read(data, state, other_size, other_batch, skip=skip)
            continue
        found = read(data, state, other_size, other_batch, skip=skip)
        assert found == [sorted(rest[begin : begin + step]) for begin in range(0, len(rest), step)]
    if num_read % 24:
        changed = [
            ({"whole": 48}, "only with the saved order 'balanced in global batches of 24"),
            ({"hidden": 5}, "hidden size 4, inside"),
            ({"skip": [[state["consumed_samples"]] * 2]}, "inside"),
        ]
        for options, words in changed:
            with pytest.raises(ArgumentError, match=words):
                sampler(data, **{"skip": skip, **options}).load_state_dict(state)
        with pytest.raises(ArgumentError, match="found a sampler that does not balance"):
            MegatronPretrainingSampler(240, 0, 1, 0, 1, fingerprint=data.fingerprint).load_state_dict(state)


def test_balance_begins_and_ends_between_global_batches(data):
    plain = MegatronPretrainingSampler(240, 48, 4, 1, 2, fingerprint=data.fingerprint, rank_seed=5)
    balanced = sampler(data, 1, 2, batch=4, consumed_samples=48)
    found, wanted = list(balanced), list(plain)
    own = sampler(data, 1, 2, batch=4, whole=48)
    own.load_state_dict(plain.state_dict(consumed_samples=48))
    assert list(own) == list(sampler(data, 1, 2, batch=4, whole=48, consumed_samples=48))
    own = MegatronPretrainingSampler(240, 0, 4, 1, 2, fingerprint=data.fingerprint, rank_seed=5)
    own.load_state_dict(balanced.state_dict(consumed_samples=48))
    assert list(own) == wanted
    own = sampler(data, 1, 2, batch=4, hidden=64)
    own.load_state_dict(balanced.state_dict(consumed_samples=48))
    assert own.state_dict()["order"] == "balanced in global batches of 24 for hidden size 64"
    assert found != wanted


def test_a_given_position_is_found_inside_its_global_batch(data):
    own = sampler(data, 0, 1, batch=4, consumed_samples=2, skip=[[30, 39]])
    for _ in itertools.islice(own, 8):
        pass
    orders = {at: own.state_dict(consumed_samples=at)["order"] for at in (2, 6, 26, 40, 44, 60, 64)}
    found = {at: order.partition(", inside ")[2] for at, order in orders.items()}
    around = "[26, 60) without 931c56e7"
    assert found == {2: "", 6: "[2, 26)", 26: "", 40: around, 44: around, 60: "", 64: "[60, 84)"}


def test_other_samples_in_the_same_place_are_refused(data):
    own = sampler(data, batch=4, skip=[[7, 7]])
    next(iter(own))
    with pytest.raises(ArgumentError, match=r"inside \[0, 25\) without \w{8}', found .* without"):
        sampler(data, batch=4, skip=[[8, 8]]).load_state_dict(own.state_dict())


@pytest.mark.parametrize(
    "order",
    [
        "balanced in global batches of 0 for hidden size 4",
        "balanced in global batches of 24 for hidden size 4, inside [24, 0)",
        "balanced in global batches of 24 for hidden size 4, inside [0, 24) ",
        "balanced in global batches of \u0662 for hidden size 4",
        7,
    ],
)
def test_positions_of_other_orders_are_refused(data, order):
    state = {**sampler(data).state_dict(), "order": order, "consumed_samples": 4}
    with pytest.raises(ArgumentError, match="a run can resume"):
        sampler(data).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"whole": 0}, "global_batch_size must be a whole number of at least 1"),
        ({"whole": 20, "size": 3, "batch": 2}, "global_batch_size must be a multiple of 6"),
        ({"hidden": 0}, "hidden_size must be a whole number of at least 1"),
        ({"hidden": 2**20 + 1}, "hidden_size must be at most 2"),
        ({"rank": 2, "size": 2}, r"data_parallel_rank must be in \[0, 2\), found 2"),
        ({"consumed_samples": 240}, "consumed_samples must be in"),
    ],
)
def test_arguments_out_of_range_are_refused(data, options, words):
    with pytest.raises(ArgumentError, match=words):
        sampler(data, **options)


def test_other_orders_are_refused(prefixes):
    data = packed(None, prefixes[2:], order="instant", sequence_length=16)
    with pytest.raises(ArgumentError, match="needs a dataset in the order 'packed', found 'instant'"):
        sampler(data)


BALANCE = {"balanced": True, "global_batch_size": 24, "hidden_size": HIDDEN}


def test_a_loader_balances_its_ranks(data):
    loaders = [trackbed.BatchLoader(data, batch_size=3, rank=rank, num_ranks=2, **BALANCE) for rank in range(2)]
    assert {len(loader) for loader in loaders} == {40}
    read = [[] for _ in loaders]
    for rank, loader in enumerate(loaders):
        loader.hash_samples()
        for _ in itertools.islice(loader, 8):
            pass
        read[rank] = [batch.positions for batch in loader.pop_hashes()]
        assert read[rank] == list(itertools.islice(sampler(data, rank, 2, batch=3), 8))
        assert loader.consumed_samples == 48
        for first in (0, 24):
            division = loader.division()
            own = list(itertools.chain(*read[rank][first // 6 : first // 6 + 4]))
            assert samples_of(first, 24, rank, **division, dataset=data) == own
            assert samples_of(first, 24, None, **division) == list(range(first, first + 24))
    with pytest.raises(ArgumentError, match="need the dataset, found none"):
        samples_of(0, 24, 0, **loaders[0].division())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_size": None}, "must be given together, found True, 24 and None"),
        ({"balanced": False}, "must be given together, found False, 24 and 4"),
        ({"balanced": 1}, "balanced must be True or False, found 1"),
        ({"shuffle_ranks": True}, "takes the place of shuffle_ranks"),
        ({"drop_last": False}, "needs drop_last"),
        ({"global_batch_size": 242}, "at least 242 samples, a global batch, found 240"),
        ({"batch_size": 5}, "global_batch_size must be a multiple of 5"),
    ],
)
def test_options_of_a_loader_that_do_not_fit_are_refused(data, options, words):
    with pytest.raises(ArgumentError, match=re.escape(words)):
        trackbed.BatchLoader(data, **{"batch_size": 1, **BALANCE, **options})


def lengths_of(kind, size):
    """Lengths of documents of fine-tuning, and of text with some long ones."""
    rng = np.random.default_rng(7)
    if kind == "sft":
        drawn = rng.lognormal(np.log(500), 1.2, size)
    else:
        is_long = rng.random(size) < 0.03
        drawn = np.where(is_long, rng.lognormal(np.log(40_000), 0.8, size), rng.lognormal(np.log(1_500), 0.8, size))
    return np.maximum(2, drawn).astype(np.int32)


@pytest.mark.parametrize("kind", ["sft", "long"])
@pytest.mark.parametrize("packs_of_rank", [4, 16])
def test_ranks_have_about_the_same_work(kind, packs_of_rank):
    packs = Packs(lengths_of(kind, 2_000_000), PackShape(32_768))
    tables = CostTables(packs, hidden_size=4096)
    rng = np.random.default_rng(1)
    of_steps, of_turns, of_none = [], [], []
    for _ in range(5):
        costs = tables.find(rng.permutation(len(packs))[: 512 * packs_of_rank])
        dealt = costs[deal_packs(costs, 512)]
        loads = dealt.sum(axis=0)
        of_steps.append(loads.max() / loads.mean())
        of_turns.append(dealt.max(axis=1).sum() / dealt.mean(axis=1).sum())  # where ranks wait at each micro-batch
        loads = costs.reshape(packs_of_rank, 512).sum(axis=0)
        of_none.append(loads.max() / loads.mean())
    assert np.max(of_steps) <= (1.10 if packs_of_rank == 4 else 1.01)
    assert packs_of_rank == 4 or np.max(of_turns) <= 1.03
    assert np.mean(of_none) > 1.04
