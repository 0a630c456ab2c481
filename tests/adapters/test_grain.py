"""Batches for Grain."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import grain
import pytest
import torch

import trackbed
from tests.adapters.training import STEP, both_tiers, check_runs, digests, expected, masked, run
from trackbed.adapters.grain import MicroBatches, batch_iterator
from trackbed.errors import ArgumentError

RANK = Path(__file__).parent / "grain_rank.py"


@pytest.mark.dist
@both_tiers
def test_a_run_goes_on_with_the_same_samples_on_other_ranks(is_compared, folder, tmp_path):
    check_runs(
        lambda size, last, saved: run(RANK, size, folder, last, saved),
        expected(folder),
        tmp_path,
        is_compared,
        copy=shutil.copy,
    )


def batches_of(folder, blend="blend.toml", micro_batch_size=2, rank=0, num_ranks=1):
    source = MicroBatches(trackbed.open_blend(folder / blend).train, micro_batch_size)
    return batch_iterator(source, micro_batches_per_step=STEP // micro_batch_size, rank=rank, num_ranks=num_ranks)


def samples_of(batch):
    tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
    return digests(tensors["tokens"], masked(tensors["labels"], tensors["loss_mask"]))


def test_its_states_and_those_of_a_batch_loader_are_the_same(folder):
    wanted = expected(folder)
    batches = batches_of(folder)
    for _ in range(3):
        next(batches)
    loader = trackbed.BatchLoader(
        trackbed.open_blend(folder / "blend.toml").train, batch_size=STEP, rank=0, num_ranks=1
    )
    loader.load_state_dict(batches.get_state())
    for number, batch in enumerate(loader, 3):
        assert samples_of(batch) == wanted[number]
        if number == 5:
            break
    again = batches_of(folder, micro_batch_size=1)
    again.set_state(loader.state_dict())
    assert samples_of(next(again)) == wanted[6]


def test_another_blend_is_refused(folder):
    state = batches_of(folder).get_state()
    with pytest.raises(ArgumentError, match="a run can resume only with"):
        batches_of(folder, "other.toml").set_state(state)


def test_all_ranks_stop_together_where_no_step_is_left(folder):
    dataset = trackbed.open_blend(folder / "blend.toml").train
    of_ranks = [
        batch_iterator(MicroBatches(dataset, 7), micro_batches_per_step=8, rank=rank, num_ranks=4) for rank in range(4)
    ]
    assert [sum(1 for _ in batches) for batches in of_ranks] == [len(dataset) // 56] * 4


def test_grain_reads_records_by_itself_also_in_processes(folder):
    source = MicroBatches(trackbed.open_blend(folder / "blend.toml").train, STEP)
    wanted = expected(folder)[:2]
    records = grain.MapDataset.source(source).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    assert [samples_of(record) for _, record in zip(range(2), records, strict=False)] == wanted
    with pytest.raises(IndexError, match="a record must be in"):
        source[len(source)]


def test_wrong_arguments_are_refused(folder):
    dataset = trackbed.open_blend(folder / "blend.toml").train
    with pytest.raises(ArgumentError, match="dataset must be that of a split"):
        MicroBatches([1], 1)
    with pytest.raises(ArgumentError, match="micro_batch_size must be a whole number of at least 1"):
        MicroBatches(dataset, 0)
    with pytest.raises(ArgumentError, match="num_ranks must be above rank, and divide"):
        batch_iterator(MicroBatches(dataset, 1), micro_batches_per_step=3, rank=0, num_ranks=2)
    with pytest.raises(ArgumentError, match=r"rank must be a whole number of at least 0, found 1.0"):
        batch_iterator(MicroBatches(dataset, 1), micro_batches_per_step=2, rank=1.0, num_ranks=2)
    for source in (dataset, MicroBatches(dataset, len(dataset) // 2)):
        with pytest.raises(ArgumentError, match="source must be MicroBatches, 3 of them or more"):
            batch_iterator(source, micro_batches_per_step=3, rank=0, num_ranks=1)
    batches = batch_iterator(MicroBatches(dataset, 3), micro_batches_per_step=1, rank=0, num_ranks=1)
    with pytest.raises(ArgumentError, match="must be a multiple of micro_batch_size"):
        batches.set_state({**batches.get_state(), "consumed_samples": 4})


def test_a_program_that_ends_with_an_iterator_open_ends_well(folder):
    program = f"""
        import trackbed
        from trackbed.adapters.grain import MicroBatches, batch_iterator
        dataset = trackbed.open_blend({str(folder / "blend.toml")!r}).train
        options = dict(micro_batches_per_step=2, rank=0, num_ranks=1)
        batches = batch_iterator(MicroBatches(dataset, 2), **options)
        other = batch_iterator(MicroBatches(dataset, 2), **options)
        print(len(next(batches)["tokens"]), len(next(other)["tokens"]))
        other.close()
        try:
            next(other)
        except trackbed.ArgumentError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "4 4\nthe iterator must be open, found it is closed\n")
    assert "Exception ignored" not in done.stderr
