"""Tests of the prefetching loader, over real files."""

import contextlib
import copy
import gc
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from tests.loading.test_read_ahead import threads_left, was_interrupted
from tests.support import ROOT
from tests.support.files.blends import build, gpt_config, write_pair, write_pairs
from tests.support.processes.forked import run_in_fork
from trackbed.datasets import GPTDataset
from trackbed.errors import ArgumentError
from trackbed.loading import BatchStream, MegatronPretrainingRandomSampler, MegatronPretrainingSampler

ORDERS = ("megatron", "balanced", "instant")


def blended(folder, order="megatron", cls=GPTDataset, **options):
    config = gpt_config(None, blend=(write_pairs(folder), [3, 2, 1]), split="1", order=order, **options)
    return build(config, (200, None, None), cls=cls)[0]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return blended(tmp_path_factory.mktemp("pairs"), create_attention_mask=False)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert [one for one in threading.enumerate() if one.name == "trackbed-ahead" and one.is_alive()] == []


def sampler(dataset, batch=4, consumed=0, rank=0, size=1):
    return MegatronPretrainingSampler(len(dataset), consumed, batch, rank, size, fingerprint=dataset.fingerprint)


def tokens(batch):
    return batch["tokens"].tolist()


def wanted(dataset, positions):
    return [dataset[position]["tokens"].tolist() for position in positions]


def wanted_batches(dataset, count):
    """The tokens of the first batches of four."""
    return [wanted(dataset, range(first, first + 4)) for first in range(0, 4 * count, 4)]


@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_those_that_the_sampler_names(tmp_path, order):
    dataset = blended(tmp_path, order)
    for batch, indices in zip(BatchStream(dataset, sampler(dataset)), sampler(dataset), strict=True):
        for name, tensor in dataset.gather(indices).items():
            assert torch.equal(batch[name], tensor)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_batch_that_is_held_is_never_overwritten(dataset, ahead):
    loader = BatchStream(dataset, sampler(dataset), ahead=ahead)
    held = list(loader)
    assert [tokens(batch) for batch in held] == [wanted(dataset, range(first, first + 4)) for first in range(0, 200, 4)]


def test_a_view_of_a_part_of_one_tensor_is_enough_to_hold_it(dataset):
    views, copies = [], []
    for batch in BatchStream(dataset, sampler(dataset), ahead=1):
        views.append(batch["labels"][1:, ::2])
        copies.append(batch["labels"][1:, ::2].clone())
    assert all(torch.equal(view, copy) for view, copy in zip(views, copies, strict=True))


def test_memory_is_reused_when_it_is_not_referenced(dataset):
    loader = BatchStream(dataset, sampler(dataset), ahead=1)
    assert len({batch["tokens"].data_ptr() for batch in loader}) <= 4


def test_batches_of_changing_size_are_made(dataset):
    sizes = [1, 5, 2, 5, 1, 7, 2] * 5
    stops = np.cumsum(sizes)
    batches = [list(range(stop - size, stop)) for stop, size in zip(stops.tolist(), sizes, strict=True)]
    found = [tokens(batch) for batch in BatchStream(dataset, batches)]
    assert found == [wanted(dataset, indices) for indices in batches]


def test_a_sampler_without_a_position_is_counted(dataset):
    batches = [[5, 1], [2, 9], [7, 0], [4, 4]]
    loader = BatchStream(dataset, batches)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    state = loader.state_dict()
    assert state == {"version": 1, "batches": 2, "data_checksum": dataset.data_checksum.result()}
    other = BatchStream(dataset, batches)
    other.load_state_dict(loader.state_dict())
    assert [tokens(batch) for batch in other] == [wanted(dataset, indices) for indices in batches[2:]]
    assert [tokens(batch) for batch in other] == [wanted(dataset, indices) for indices in batches]
    with pytest.raises(ArgumentError, match="must have version 1 and a number of batches"):
        other.load_state_dict({"version": 1, "batches": -1})
    iterator.close()


def take(loader, count):
    """Takes `count` batches; returns them and the state after them."""
    found = []
    for batch, _ in zip(loader, range(count), strict=False):
        found.append(tokens(batch))
        if len(found) == count:
            return found, loader.state_dict()
    return found, loader.state_dict()


@given(
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4),
    ahead=st.integers(1, 4),
)
def test_a_run_that_stops_and_goes_on_with_other_ranks_reads_the_same_sequence(dataset, legs, ahead):
    found, state = [], None
    for ranks, batch, count in legs:
        loaders = [
            BatchStream(dataset, sampler(dataset, batch=batch, rank=rank, size=ranks), ahead=ahead)
            for rank in range(ranks)
        ]
        taken = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            taken.append(take(loader, count))
        assert all(one == taken[0][1] for _, one in taken)
        state = taken[0][1]
        for step in zip(*(batches for batches, _ in taken), strict=True):
            for micro_batch in step:
                found += micro_batch
    assert found == wanted(dataset, range(len(found)))
    assert state["consumed_samples"] == len(found)


@given(stops=st.lists(st.integers(1, 9), max_size=5), data_sharding=st.booleans())
def test_a_random_order_goes_on_after_the_last_batch_handed_out(dataset, stops, data_sharding):
    def loader():
        order = MegatronPretrainingRandomSampler(dataset, len(dataset), 0, 4, 1, 2, data_sharding)
        return BatchStream(dataset, order, ahead=3)

    whole, running = loader(), []
    for _ in range(3):
        running += [tokens(batch) for batch in whole]
    found, state = [], None
    for stop in stops:
        one = loader()
        if state is not None:
            one.load_state_dict(state)
        more, state = take(one, stop)
        found += more
    assert found == running[: len(found)]


def test_an_iteration_that_is_left_goes_on_where_it_was(dataset):
    loader = BatchStream(dataset, sampler(dataset), ahead=3)
    for batch in loader:
        assert tokens(batch) == wanted(dataset, range(4))
        break
    state = loader.state_dict()
    assert state["consumed_samples"] == 4
    assert tokens(next(iter(loader))) == wanted(dataset, range(4, 8))


def test_an_iteration_that_has_ended_begins_as_the_sampler_does(dataset):
    loader = BatchStream(dataset, sampler(dataset, batch=50))
    assert [tokens(batch) for batch in loader] == [tokens(batch) for batch in loader]


def test_a_second_iteration_ends_the_first(dataset):
    loader = BatchStream(dataset, sampler(dataset))
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert tokens(next(second)) == wanted(dataset, range(4, 8))
    assert list(first) == []
    assert tokens(next(second)) == wanted(dataset, range(8, 12))
    second.close()


def test_the_state_is_that_of_a_sampler_and_is_taken_by_one(dataset):
    loader = BatchStream(dataset, sampler(dataset))
    assert loader.state_dict() == sampler(dataset).state_dict()
    _, state = take(loader, 3)
    other = sampler(dataset)
    other.load_state_dict(state)
    assert next(iter(other)) == [12, 13, 14, 15]
    with pytest.raises(ArgumentError, match="only with the saved fingerprint"):
        loader.load_state_dict({**state, "fingerprint": "0", "content": None})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_torchs_checkpoints_keep_the_state(dataset, tmp_path):
    loader = BatchStream(dataset, sampler(dataset))
    take(loader, 3)
    dcp.save({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
    other = BatchStream(dataset, sampler(dataset))
    dcp.load({"loader": other}, checkpoint_id=tmp_path, no_dist=True)
    assert tokens(next(iter(other))) == wanted(dataset, range(12, 16))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()


def test_tokens_are_counted_for_each_dataset(dataset):
    loader = BatchStream(dataset, sampler(dataset))
    take(loader, 10)
    counters = loader.counters
    assert counters.tokens.tolist() == (16 * np.bincount(dataset.dataset_index[:40], minlength=3)).tolist()
    assert (counters.batches, counters.samples) == (10, 40)
    alone = BatchStream(dataset.datasets[0], [[0, 1, 2]])
    take(alone, 1)
    assert alone.counters.tokens.tolist() == [48]


class _Slow(GPTDataset):
    """A dataset that is slow for each sample."""

    def __getitem__(self, idx):
        time.sleep(0.02)
        return super().__getitem__(idx)


def test_stalls_are_counted(tmp_path):
    dataset = blended(tmp_path, cls=_Slow)
    slow = BatchStream(dataset, sampler(dataset, batch=2))
    stalls = stalls_of(slow, seconds_each=0.0)
    assert max(stalls) > 0.02
    assert sum(stalls) == pytest.approx(slow.counters.stall_seconds)
    patient = BatchStream(dataset, sampler(dataset, batch=2), ahead=2)
    assert min(stalls_of(patient, seconds_each=0.3)) < 0.02


def stalls_of(loader, seconds_each):
    """Last stall of each of four batches, each used for `seconds_each`."""
    stalls = []
    for _ in zip(range(4), loader, strict=False):
        stalls.append(loader.counters.last_stall_seconds)
        time.sleep(seconds_each)
    return stalls


class _Numbered(GPTDataset):
    """A dataset whose samples hold an additional key."""

    def __getitem__(self, idx):
        return {**super().__getitem__(idx), "number": idx}


def test_samples_that_hold_something_else_are_loaded_too(tmp_path):
    prefix = write_pair(tmp_path / "pair", [50] * 30)
    dataset = build(gpt_config(None, blend=([prefix], None), split="1"), cls=_Numbered)[0]
    found = [batch["number"].tolist() for batch in BatchStream(dataset, [[0, 3], [5, 1], [2, 2]] * 3)]
    assert found == [[0, 3], [5, 1], [2, 2]] * 3


class _Named(GPTDataset):
    """A dataset whose samples have values that NumPy does not have."""

    def __getitem__(self, idx):
        return {
            **super().__getitem__(idx),
            "name": f"number {idx}",
            "half": torch.full((2,), idx, dtype=torch.bfloat16),
        }


def test_samples_that_hold_what_numpy_does_not_have_are_loaded_too(tmp_path):
    prefix = write_pair(tmp_path / "pair", [50] * 30)
    dataset = build(gpt_config(None, blend=([prefix], None), split="1"), cls=_Named)[0]
    held = list(BatchStream(dataset, [[0, 3], [5, 1]] * 3))
    assert [batch["name"] for batch in held] == [["number 0", "number 3"], ["number 5", "number 1"]] * 3
    assert [batch["half"].tolist() for batch in held] == [[[0.0] * 2, [3.0] * 2], [[5.0] * 2, [1.0] * 2]] * 3


class _Uneven(GPTDataset):
    """A dataset whose samples differ in size."""

    def __getitem__(self, idx):
        return {**super().__getitem__(idx), "extra": torch.arange(idx % 7 + 1)}


def test_samples_that_differ_in_size_are_loaded_one_by_one(tmp_path):
    prefix = write_pair(tmp_path / "pair", [50] * 30)
    dataset = build(gpt_config(None, blend=([prefix], None), split="1"), cls=_Uneven)[0]
    sizes = [batch["extra"].numel() for batch in BatchStream(dataset, [[number] for number in range(20)])]
    assert sizes == [number % 7 + 1 for number in range(20)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_loader_has_memory_of_its_own(dataset, copied):
    loader = BatchStream(dataset, sampler(dataset))
    first = [tokens(batch) for batch in loader]
    assert [tokens(batch) for batch in copied(loader)] == first


def test_a_copy_of_a_batch_is_filled_by_itself(dataset):
    batch = dataset.gather([0, 1])
    before, other = tokens(batch), copy.deepcopy(batch)
    assert tokens(dataset.gather([6, 7], out=other)) == wanted(dataset, [6, 7])
    assert tokens(batch) == before


def test_memory_is_reused_after_a_collection_of_cycles(dataset):
    places = set()
    for batch in BatchStream(dataset, sampler(dataset), ahead=1):
        places.add(batch["tokens"].data_ptr())
        gc.collect()
    assert len(places) <= 4


class _Broken(GPTDataset):
    """A dataset that fails for one of its samples."""

    def __getitem__(self, idx):
        if idx == 9:
            raise RuntimeError("the tenth sample is broken")
        return super().__getitem__(idx)


def test_an_error_on_the_thread_is_raised_in_place_of_the_batch(tmp_path):
    prefix = write_pair(tmp_path / "pair", [50] * 30)
    dataset = build(gpt_config(None, blend=([prefix], None), split="1"), cls=_Broken)[0]
    loader = BatchStream(dataset, sampler(dataset), ahead=4)
    iterator = iter(loader)
    assert [tokens(next(iterator)) for _ in range(2)] == wanted_batches(dataset, 2)
    for broken in (iterator, iter(loader)):
        with pytest.raises(RuntimeError, match="the tenth sample is broken"):
            next(broken)
    assert loader.state_dict()["consumed_samples"] == 8


def test_an_error_in_the_sampler_is_raised_too(dataset):
    def batches():
        yield [0]
        raise OSError("no more")

    iterator = iter(BatchStream(dataset, batches()))
    next(iterator)
    with pytest.raises(OSError, match="no more"):
        next(iterator)


def test_closing_ends_the_thread_and_may_be_done_twice(dataset):
    loader = BatchStream(dataset, sampler(dataset))
    iterator = iter(loader)
    next(iterator)
    deadline = time.monotonic() + 5
    while not any(thread.name == "trackbed-ahead" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
    loader.close()
    loader.close()
    assert not any(thread.name == "trackbed-ahead" for thread in threading.enumerate())
    assert list(iterator) == []
    assert loader.state_dict()["consumed_samples"] == 4


def test_deleting_a_loader_ends_its_thread(dataset):
    loader = BatchStream(dataset, sampler(dataset))
    gone = weakref.ref(loader)
    iterator = iter(loader)
    next(iterator)
    del loader, iterator
    gc.collect()
    assert gone() is None


def test_a_forked_child_must_iterate_again_and_can(dataset):
    loader = BatchStream(dataset, sampler(dataset))
    iterator = iter(loader)
    next(iterator)

    def work():
        with pytest.raises(ArgumentError, match="found a fork of it: iterate again"):
            next(iterator)
        return tokens(next(iter(loader)))

    assert run_in_fork(work) == wanted(dataset, range(4, 8))
    assert tokens(next(iterator)) == wanted(dataset, range(4, 8))
    loader.close()


@pytest.mark.parametrize(
    "made", ["BatchStream(dataset, [list(range(k, k + 8)) for k in range(300)]", "BatchLoader(dataset, batch_size=8"]
)
def test_a_program_that_ends_in_the_middle_ends_well(tmp_path, made):
    write_pair(tmp_path / "pair", [5000] * 200)
    program = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests.support.files.blends import build, gpt_config
        from trackbed import BatchLoader
        from trackbed.loading import BatchStream
        options = dict(sequence_length=2048, reset_attention_mask=True)
        config = gpt_config(None, blend=([{str(tmp_path / "pair")!r}], None), split="1", **options)
        dataset = build(config, (400, None, None))[0]
        loader = {made}, ahead=3)
        iterator = iter(loader)
        next(iterator)
        print("ends")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ahead": 0}, "ahead must be a whole number of at least 1, found 0"),
        ({"num_threads": 0}, "num_threads must be a whole number of at least 1, found 0"),
        ({"device": "cpu"}, "device must be a CUDA device, or None for batches in the host's memory, found cpu"),
    ],
)
def test_arguments_out_of_range_are_refused(dataset, options, words):
    with pytest.raises(ArgumentError, match=words):
        BatchStream(dataset, [[0]], **options)


def test_a_dataset_that_does_not_gather_is_refused():
    with pytest.raises(ArgumentError, match="dataset must support gather, as GPTDataset does, found a list"):
        BatchStream([1, 2], [[0]])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("options", [{"pinned": True}, {"device": "cuda"}])
def test_pinned_memory_needs_an_accelerator(dataset, options):
    with pytest.raises(ArgumentError, match=r"(pinned|device cuda.*): must have a GPU that torch can use, found none"):
        BatchStream(dataset, [[0]], **options)


def pretend_a_device(monkeypatch, number):
    """Pretends that this thread has a CUDA device. Returns a list of the devices that other threads use."""
    used = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.cuda.current_device",
        lambda: number if threading.current_thread() is threading.main_thread() else number + 1,
    )
    monkeypatch.setattr("torch.cuda.device", lambda number: contextlib.nullcontext(used.append(number)))
    return used


@pytest.mark.parametrize(("device", "expected"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1")])
def test_batches_go_to_the_device_of_the_thread_that_iterates(device, expected, dataset, monkeypatch):
    """The prefetch thread has a current device of its own, which would be the first one of the host."""
    used = pretend_a_device(monkeypatch, 3)
    plain, devices = dataset.empty_batch, []
    monkeypatch.setattr(dataset, "empty_batch", lambda size, **_: plain(size))
    copies = type("Copies", (), {"__init__": lambda _, device: devices.append(device), "begin": lambda _, batch: batch})
    monkeypatch.setattr("trackbed.loading.batch_stream.DeviceCopies", copies)
    for batch, indices in zip(BatchStream(dataset, sampler(dataset), device=device), sampler(dataset), strict=True):
        assert tokens(batch) == wanted(dataset, indices)
    assert devices == [torch.device(expected)]
    assert set(used) == {3}


@pytest.mark.parametrize("pinned", [False, True])
def test_pinned_memory_that_is_handed_out_is_not_reused(pinned, dataset, monkeypatch):
    """The program may have queued copies of it, which the ring could not wait for."""
    taken = []
    plain = dataset.empty_batch
    pretend_a_device(monkeypatch, 0)
    monkeypatch.setattr(dataset, "empty_batch", lambda size, **_: plain(size))
    monkeypatch.setattr("trackbed.loading.ring.Ring.take", lambda _ring, size: taken.append(size))
    loader = BatchStream(dataset, sampler(dataset), pinned=pinned)
    for batch, indices in zip(loader, sampler(dataset), strict=True):
        assert tokens(batch) == wanted(dataset, indices)
    assert bool(taken) == (not pinned)


# Python reports and ignores an interrupt that arrives in the callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_an_iteration_starts_leaves_no_thread(dataset):
    draw, interrupted, iterators = random.Random(3), 0, []
    for _ in range(200):
        loader = BatchStream(dataset, sampler(dataset))

        def start(loader=loader):
            iterators.append(iter(loader))
            assert tokens(next(iterators[-1])) == wanted_batches(dataset, 1)[0]
            iterators[-1].close()
            time.sleep(500e-6)

        interrupted += was_interrupted(start, draw.uniform(1e-6, 400e-6))
        loader.close()
    assert interrupted > 50
    assert threads_left() == []


class Dropping:
    """A sampler that drops an iterator on the prefetch thread."""

    def __init__(self, batches):
        self.batches = batches
        self.held = []
        self.dropped_on = None

    def __iter__(self):
        for number, batch in enumerate(self.batches):
            if number == 2:
                while not self.held:
                    time.sleep(0.001)
                self.dropped_on = threading.current_thread().name
                self.held.clear()
            yield batch


def test_an_iterator_may_be_collected_on_the_prefetch_thread(dataset):
    batches = [[4 * number, 4 * number + 1] for number in range(6)]
    dropping = Dropping(batches)
    loader = BatchStream(dataset, dropping, ahead=3)
    iterator = iter(loader)
    assert tokens(next(iterator)) == wanted(dataset, batches[0])
    dropping.held.append(iterator)
    del iterator
    deadline = time.monotonic() + 5
    while dropping.held and time.monotonic() < deadline:
        time.sleep(0.005)
    assert dropping.dropped_on == "trackbed-ahead"
    assert loader.state_dict()["batches"] == 1
    dropping.held.append(None)
    assert [tokens(batch) for batch in loader] == [wanted(dataset, batch) for batch in batches[1:]]
