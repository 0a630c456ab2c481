"""Positions that a run leaves out."""

from itertools import chain, repeat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.blends import build, gpt_config, write_pair
from trackbed import ArgumentError, BatchLoader
from trackbed.loading.loader import samples_of
from trackbed.loading.samplers import MegatronPretrainingSampler
from trackbed.loading.skipped import Skipped

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda one: (one[0], one[0] + one[1])), max_size=6
)


@given(ranges=RANGES, first=st.integers(0, 70), count=st.integers(0, 20), total=st.integers(0, 70))
def test_positions_are_those_that_a_loop_finds(ranges, first, count, total):
    def is_kept(position):
        return not any(low <= position <= high for low, high in ranges)

    skipped = Skipped(ranges)
    wanted = [position for position in range(first, total) if is_kept(position)][:count]
    assert list(skipped.next_positions(first, count, total=total)) == wanted
    assert skipped.num_kept(total) == sum(map(is_kept, range(total)))
    assert Skipped(skipped.ranges()).ranges() == skipped.ranges()


@given(ranges=RANGES, size=st.integers(1, 3), stop=st.integers(0, 10), num_ranks=st.integers(1, 3))
def test_ranks_share_what_is_kept_also_after_a_stop(ranges, size, stop, num_ranks):
    samplers = [MegatronPretrainingSampler(70, 0, size, rank, num_ranks, skip=ranges) for rank in range(num_ranks)]
    steps = [sum(parts, []) for parts in zip(*samplers, strict=True)]
    kept = list(Skipped(ranges).next_positions(0, 70, total=70))
    step = size * num_ranks
    assert steps == [kept[k : k + step] for k in range(0, len(kept) - step + 1, step)]
    first = MegatronPretrainingSampler(70, 0, step, 0, 1, skip=ranges)
    before = [batch for _, batch in zip(range(stop), first, strict=False)]
    resumed = MegatronPretrainingSampler(70, 0, step, 0, 1, skip=ranges)
    resumed.load_state_dict(first.state_dict())
    assert before + list(resumed) == steps


@pytest.mark.parametrize("skip", [[[3, 2]], [[-1, 2]], [[1]], [[1, 2, 3]], [[1.0, 2]], [3], ["12"]])
def test_what_is_no_range_is_refused(skip):
    with pytest.raises(ArgumentError, match="skip must have pairs of a first and a last position"):
        Skipped(skip)


def test_a_loader_leaves_samples_out_and_says_which(tmp_path):
    write_pair(tmp_path / "pair", [100] * 50)
    config = gpt_config(None, blend=([str(tmp_path / "pair")], None), split="1", sequence_length=16)
    dataset = build(config, (100, None, None))[0]
    loader = BatchLoader(dataset, batch_size=4, skip=[[2, 5], [6, 6], [90, 10**12]])
    assert (loader.division()["skip"], len(loader)) == ([[2, 6], [90, 10**12]], 85 // 4)
    batches = list(loader)
    assert len(batches) == len(loader)
    wanted = [dataset[position]["tokens"] for position in (0, 1, 7, 8)]
    assert torch.equal(batches[0]["tokens"], torch.stack(wanted))
    with pytest.raises(ArgumentError, match="at least 1 sample that is not left out, found none"):
        BatchLoader(dataset, batch_size=4, skip=[[0, 10**12]])


@pytest.mark.parametrize("shuffle_ranks", [False, True])
@pytest.mark.parametrize("skip", [[], [[5, 9], [40, 40]]])
@pytest.mark.parametrize("drop_last", [True, False])
def test_what_a_rank_read_in_a_step_is_found_again(tmp_path, shuffle_ranks, skip, drop_last):
    write_pair(tmp_path / "pair", [100] * 50)
    config = gpt_config(None, blend=([str(tmp_path / "pair")], None), split="1", sequence_length=16)
    dataset = build(config, (101, None, None))[0]
    options = {"batch_size": 3, "num_ranks": 2, "shuffle_ranks": shuffle_ranks, "skip": skip, "drop_last": drop_last}
    loaders = [BatchLoader(dataset, rank=rank, **options) for rank in range(2)]
    batches = []
    for loader in loaders:
        loader.hash_samples()
        batches.append(chain.from_iterable(repeat(loader)))  # passes follow one another
    for count in [1, 1, 3, 2, 4, 4, 4, 4, 4]:  # a ramp-up of the batch size
        read = []
        for loader, own in zip(loaders, batches, strict=True):
            for _ in range(count):
                next(own)
            read.append([[int(one) for one in batch.positions] for batch in loader.pop_hashes()])
        first = min(one for own in read for one in own[0])
        total = sum(len(batch) for own in read for batch in own)
        for rank, own in enumerate(read):
            assert samples_of(first, total, rank, **loaders[0].division()) == sum(own, []), (count, rank)
        found = samples_of(first, total, None, **loaders[0].division())
        assert sorted(found) == sorted(sum(read[0] + read[1], []))
