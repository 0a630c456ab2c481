"""Copies that are made later, and states that do not fit into the memory for copies."""

import logging
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpointer.test_checkpointer import Gate, state_of, value_of
from tests.support.tiers import slow_but
from trackbed import (
    Checkpointer,
    DataParallelOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    load,
    load_sharded_state,
    sharded_state,
)
from trackbed.checkpoint.background import copies as copies_module
from trackbed.checkpoint.background import slab as slab_module
from trackbed.checkpoint.background.copies import LaterCopies
from trackbed.checkpoint.background.slab import Slab
from trackbed.checkpoint.io.targets import FileTarget
from trackbed.checkpointer import writer as writer_module
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError

MIB = 1 << 20


@pytest.fixture
def gate(monkeypatch):
    """Gate that is closed at first, and holds the writing of files."""
    return Gate(monkeypatch)


class Later:
    """Holds the copies that are made later until it is opened."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.nums_copied = []
        make = LaterCopies.make

        def held(copies, poll):
            self.nums_copied.append(len(copies._versions))
            while not self.opened.wait(0.01):
                poll()
            return make(copies, poll)

        monkeypatch.setattr(LaterCopies, "make", held)

    def open_after(self, seconds):
        threading.Timer(seconds, self.opened.set).start()


@pytest.fixture
def later(monkeypatch):
    """Copies that are made later, and not before a test lets them."""
    return Later(monkeypatch)


def program():
    """A model and its optimizer, which has made a step."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def make_step(model, optimizer):
    model(torch.rand(16, 30)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def clones(model, optimizer):
    tensors = [*model.state_dict().values(), *(state["exp_avg"] for state in optimizer.state.values())]
    return [one.clone() for one in tensors]


def saved(path, like):
    """Values of a program that a checkpoint has."""
    model, optimizer = like
    load_sharded_state(path, model, optimizer)
    return clones(model, optimizer)


@given(
    shape=st.lists(st.integers(0, 9), max_size=4),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.bool, torch.float8_e5m2]),
    order=st.randoms(),
    step=st.integers(1, 3),
    num_threads=st.integers(1, 4),
)
def test_several_threads_copy_tensors_of_any_strides(shape, dtype, order, step, num_threads):
    count = 3 * max(1, int(np.prod([max(1, size) for size in shape])))
    whole = torch.arange(count).to(torch.float32).to(dtype).as_strided((count // step,), (step,))
    axes = list(range(len(shape)))
    order.shuffle(axes)
    tensor = whole[: int(np.prod(shape))].reshape(shape).permute(axes)
    sources = [tensor, tensor.conj() if dtype.is_complex else tensor, whole, whole[:1].expand(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies_module, "_PIECE_BYTES", 64)
        patch.setattr(slab_module, "num_copying_threads", lambda: num_threads)
        copies = Slab().copies_of(sources)
    for source, copy in zip(sources, copies, strict=True):
        assert copy.is_contiguous()
        assert (copy.shape, copy.dtype) == (source.shape, source.dtype)
        assert (
            copy.resolve_conj().contiguous().view(-1).tolist() == source.resolve_conj().contiguous().view(-1).tolist()
        )


def test_a_step_waits_for_copies_of_parameters_and_states(later, tmp_path):
    with Checkpointer(tmp_path, snapshot="deferred", group=SOLO) as checkpointer:
        model, optimizer = program()
        make_step(model, optimizer)
        expected = clones(model, optimizer)
        checkpointer.save(1, sharded_state(model, optimizer))
        model(torch.rand(16, 30)).sum().backward()  # changes the statistics of the model, which are copied
        assert not later.opened.is_set()
        later.open_after(0.3)
        optimizer.step()
        assert later.opened.is_set()
        checkpointer.wait()
        assert later.nums_copied == [6 + 3 * 6]
    assert not torch.equal(model[0].weight, expected[0])
    assert all(map(torch.equal, saved(checkpointer.path(1), program()), expected))


def test_what_no_optimizer_has_stepped_is_copied_at_once(later, tmp_path):
    later.opened.set()
    model, optimizer = program()
    with Checkpointer(tmp_path, snapshot="deferred", group=SOLO) as checkpointer:
        checkpointer.save(1, sharded_state(model, optimizer))
        checkpointer.wait()
    assert later.nums_copied == [0]


@pytest.mark.parametrize("locks", [True, False])
def test_a_change_without_an_optimizer_needs_the_lock(locks, later, tmp_path):
    model, optimizer = program()
    with Checkpointer(tmp_path, snapshot="deferred", group=SOLO) as checkpointer:
        make_step(model, optimizer)
        expected = clones(model, optimizer)
        checkpointer.save(1, sharded_state(model, optimizer))
        later.open_after(0.1)
        if locks:
            with checkpointer.lock(), torch.no_grad():
                model[0].weight.zero_()
            checkpointer.wait()
        else:
            with torch.no_grad():
                model[0].weight.zero_()
            with pytest.raises(CheckpointError, match=r"of shape \[20, 30\] must be changed by steps of optimizers al"):
                checkpointer.wait()
            assert checkpointer.latest() is None
            checkpointer.save(1, sharded_state(model, optimizer))
            expected = clones(model, optimizer)
            make_step(model, optimizer)
            checkpointer.wait()
    assert all(map(torch.equal, saved(checkpointer.path(1), program()), expected))


def test_a_load_waits_for_copies_of_a_save_in_flight(later, tmp_path):
    with Checkpointer(tmp_path, snapshot="deferred", group=SOLO) as checkpointer:
        model, optimizer = program()
        make_step(model, optimizer)
        later.opened.set()
        checkpointer.save(1, sharded_state(model, optimizer))
        checkpointer.wait()
        make_step(model, optimizer)
        expected = clones(model, optimizer)
        later.opened.clear()
        checkpointer.save(2, sharded_state(model, optimizer))
        later.open_after(0.1)
        checkpointer.load_sharded_state(model, optimizer, step=1)
        checkpointer.wait()
    assert all(map(torch.equal, saved(checkpointer.path(2), program()), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_the_sharded_optimizer_wait_too(dtype, later, tmp_path):
    def run(group):
        torch.manual_seed(1)
        module = torch.nn.Linear(64, 64).to(dtype)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(module, config, process_group=group)
        optimizer = DataParallelOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1), model)

        def step():
            model(torch.ones(4, 64, dtype=dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        with Checkpointer(tmp_path, snapshot="deferred", group=group) as checkpointer:
            step()
            before = module.weight.clone()
            checkpointer.save(1, sharded_state(model, optimizer))
            if group.rank == 0:
                later.open_after(0.2)
            step()
            checkpointer.wait()
            assert not torch.equal(before, module.weight)
            checkpointer.load_sharded_state(model, optimizer, step=1)
            assert torch.equal(before, module.weight)

    run_ranks(2, run)
    assert all(later.nums_copied)


@pytest.mark.parametrize(
    ("size", "writer"),
    slow_but([(2, "thread"), (1, "process")], [(1, "thread"), (1, "process"), (2, "thread"), (2, "process")]),
)
def test_what_does_not_fit_is_written_before_a_save_returns(size, writer, tmp_path, caplog):
    caplog.set_level(logging.WARNING)

    def state(group, value):
        more = {str(key): torch.full((MIB,), value + key, dtype=torch.uint8) for key in range(5)}
        return {**state_of(group, value, count=100), "nested": more}

    def run(group):
        with Checkpointer(tmp_path, max_bytes=2 * MIB, writer=writer, group=group) as checkpointer:
            checkpointer.prepare(state(group, 0))
            for step in (1, 2):
                mine = state(group, step)
                checkpointer.save(step, mine)
                for tensor in (mine["rows"].data, *mine["nested"].values()):
                    tensor.zero_()
            checkpointer.wait()
            assert checkpointer._writer._slab.num_bytes <= 2 * MIB
            for record in checkpointer.history:
                assert 0 <= record.num_bytes - record.num_live_bytes <= 2 * MIB

    run_ranks(size, run)
    for step in (1, 2):
        found = load(tmp_path / f"step-000000{step}")
        assert value_of(tmp_path / f"step-000000{step}") == step
        assert [one.unique().item() for one in found["nested"].values()] == [step + key for key in range(5)]


def test_a_program_hears_once_how_long_it_waited(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with Checkpointer(tmp_path, max_bytes=10_000, group=SOLO) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(SOLO, step))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the save of step 1 has kept the program waiting for 0." in line
    assert "48,000 of 48,000 bytes do not fit into max_bytes, and were written before it returned" in line
    assert value_of(checkpointer.path(2)) == 2
    with pytest.raises(CheckpointError, match="max_bytes: must be None or an integer of at least 1, found 0"):
        Checkpointer(tmp_path, max_bytes=0, group=SOLO)


def test_a_program_that_stops_waiting_gets_no_checkpoint_of_mixed_values(gate, tmp_path, monkeypatch):
    with Checkpointer(tmp_path, max_bytes=10_000, on_failure="warn", group=SOLO) as checkpointer:
        is_busy = type(checkpointer._writer).is_busy.fget
        calls = []

        def interrupted(writer):
            calls.append(None)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return is_busy(writer)

        with monkeypatch.context() as patch:
            patch.setattr(type(checkpointer._writer), "is_busy", property(interrupted))
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, state_of(SOLO, 1))
        gate.opened.set()
        checkpointer.wait()
        assert "was interrupted while it waited" in checkpointer.history[0].error
        assert checkpointer.steps() == []
        checkpointer.save(2, state_of(SOLO, 2))
    assert value_of(checkpointer.path(2)) == 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_while_a_save_waits_is_told_on_all_ranks(who, tmp_path, monkeypatch):
    write = FileTarget.write
    failures = [who]

    def failing(target, values, poll, **options):
        if target.name == f"__{who}_1.distcp" and failures:
            failures.clear()
            raise OSError(28, "No space left on device")
        return write(target, values, poll, **options)

    monkeypatch.setattr(FileTarget, "write", failing)

    def run(group):
        with Checkpointer(tmp_path, max_bytes=1, group=group) as checkpointer:
            checkpointer.save(1, state_of(group, 1))
            with pytest.raises(CheckpointError, match=f"rank {who}.*No space left"):
                checkpointer.wait()
            checkpointer.save(2, state_of(group, 2))
            checkpointer.wait()
            assert checkpointer.steps() == [2]

    run_ranks(2, run)


def test_a_step_does_not_wait_for_a_save_that_another_rank_has_ended(tmp_path, monkeypatch):
    """Each rank fails in turn after the other one has taken its snapshot."""
    take, failing = writer_module.take_snapshot, [0]

    def failing_afterwards(state, slab, meeting, *arguments, **options):
        found = take(state, slab, meeting, *arguments, **options)
        if meeting.rank == failing[0]:
            found.abandon()
            raise OSError("no disk")
        return found

    monkeypatch.setattr(writer_module, "take_snapshot", failing_afterwards)

    def run(group):
        model, optimizer = program()
        with Checkpointer(tmp_path, snapshot="deferred", group=group) as checkpointer:
            make_step(model, optimizer)
            for who in range(2):
                failing[0] = who
                group.barrier()
                entries = sharded_state(model, optimizer, group=group)
                with pytest.raises(CheckpointError, match=f"rank {who}: OSError: no disk") as caught:
                    checkpointer.save(1, entries)
                make_step(model, optimizer)
                del caught

    run_ranks(2, run)
