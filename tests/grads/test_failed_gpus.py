"""A rank that waits for its GPU notices that another one has failed, and is freed. The GPU is pretended."""

import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.models.wrapped import layers
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError
from trackbed.grads import DistributedDataParallel
from trackbed.grads.collectives import TorchCollectives
from trackbed.grads.engine import GradientEngine
from trackbed.grads.failure_aware_wait import GROUP_IS_LOST, QueuedCopy, Waiter, end_stuck, freed_from_failures


class Queued:
    """An operation on a GPU, or an event, that ends after some time, or when it is aborted."""

    def __init__(self, seconds=float("inf")):
        self.over_at = time.monotonic() + seconds

    def is_completed(self):
        return time.monotonic() >= self.over_at

    def query(self):
        return self.is_completed()


class Backend:
    """Backend of a GPU with one operation that is queued."""

    def __init__(self, work):
        self.work = work
        self.num_aborts = 0

    def abort(self):
        self.num_aborts += 1
        self.work.over_at = 0.0

    def _get_backend(self, device):
        return self

    def rank(self):
        return 0


@pytest.fixture
def queued(monkeypatch):
    """Makes collectives whose last operation takes some seconds."""
    monkeypatch.setattr("trackbed.grads.collectives.torch.backends_of", lambda group: {"cuda": "nccl"})

    def make(seconds=float("inf")):
        backend = Backend(Queued(seconds))
        collectives = TorchCollectives(backend, device=torch.device("cuda", 0))
        collectives._issued([backend.work], torch.device("cuda", 0))
        return collectives, backend

    return make


def test_operations_that_end_by_themselves_are_not_aborted(queued):
    collectives, backend = queued(0.3)
    assert collectives.is_queued()
    began = time.monotonic()
    end_stuck([collectives])
    assert 0.2 < time.monotonic() - began < 0.9
    assert backend.num_aborts == 0
    assert not collectives.is_ended


def test_operations_that_never_end_are_aborted_once_and_the_group_is_refused_then(queued):
    collectives, backend = queued()
    threads = [threading.Thread(target=end_stuck, args=([collectives],)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert backend.num_aborts == 1
    with pytest.raises(CollectiveError, match="its operations were ended after a failure"):
        collectives.all_reduce([torch.zeros(1)], scale=1.0, average=False, label=(0, 0))


def test_a_backend_that_cannot_abort_is_left_alone(queued, monkeypatch):
    collectives, _ = queued()
    monkeypatch.setattr(Backend, "abort", None)
    end_stuck([collectives])


@pytest.mark.parametrize("way", ["hangs", "raises"])
def test_an_abort_that_hangs_or_raises_keeps_no_failure_from_the_others(way, queued, monkeypatch, caplog):
    collectives, _ = queued()
    never = threading.Event()

    def abort(backend):
        if way == "raises":
            raise ValueError("abort failed")
        never.wait()

    monkeypatch.setattr(Backend, "abort", abort)
    monkeypatch.setattr("trackbed.grads.collectives.torch._ABORT_SECONDS", 0.3)
    began = time.monotonic()
    end_stuck([collectives], 0.1)
    assert time.monotonic() - began < 1.5
    assert collectives.is_ended
    words = "have not ended in 0.3 s" if way == "hangs" else "could not be ended"
    assert words in caplog.text
    assert GROUP_IS_LOST not in caplog.text
    never.set()


def test_what_an_exchange_that_has_failed_left_in_memory_is_no_answer(tmp_path, monkeypatch):
    """On a GPU the read of what was received does not tell that nothing was: memory of an earlier exchange is there."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        collectives, numbers = TorchCollectives(dist.group.WORLD), np.array([1, 2, 3])
        first = collectives.exchange(numbers)
        first.work.wait()
        assert first.read(lambda received: received).tolist() == [[1, 2, 3]]
        names = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
        for name in names:
            monkeypatch.setattr(dist, name, lambda *_, **__: None)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: first.received.clone())
        second = collectives.exchange(numbers)
        with pytest.raises(CollectiveError, match="an exchange of the ranks was not carried out"):
            second.read(lambda received: received)
    finally:
        dist.destroy_process_group()


def test_collectives_of_a_cpu_are_not_queued():
    assert not TorchCollectives(None).is_queued()
    assert not TorchCollectives(None, device=torch.device("cpu")).is_queued()
    assert not TorchCollectives(None, device=torch.device("cpu")).end_stuck(0.0)


@pytest.mark.parametrize("blocks", ["reads", "waits for the GPU itself"])
def test_a_failure_frees_a_rank_whose_gpu_waits_for_ever(blocks, queued):
    """`loss.item()` returns once the operation is ended, and the next wait notices the failure."""
    collectives, backend = queued()
    left = []

    def train(group):
        waiter = Waiter(group)
        with group.guarded("training", max_heartbeat_gap_seconds=float("inf")) as step, waiter.inside(step):
            if group.rank == 1:
                time.sleep(0.5)
                left.append(time.monotonic())
                raise ValueError("the original message")
            with freed_from_failures([collectives], step.check, group):
                if blocks == "reads":
                    waiter.wait(QueuedCopy(backend.work), "numbers of a step")
                while not backend.work.query():
                    time.sleep(0.01)
                waiter.wait(QueuedCopy(Queued(60)), "numbers of a step")

    def result(group):
        try:
            train(group)
        except CollectiveError as error:
            return str(error), time.monotonic()

    found = run_ranks(2, result)
    assert {text for text, _ in found} == {"training: rank 1: ValueError: the original message"}
    assert max(at for _, at in found) - left[0] < 2
    assert backend.num_aborts == (blocks != "reads")  # a read leaves by itself; `guarded` of the wrapper ends the rest
    assert not any(thread.name == "trackbed-failures" for thread in threading.enumerate())


def test_a_step_that_ends_well_aborts_nothing_however_long_it_takes_to_leave(queued):
    collectives, backend = queued()

    def train(group):
        with group.guarded("training") as step, freed_from_failures([collectives], step.check, group):
            time.sleep(1.3 * group.rank)

    run_ranks(2, train)
    assert backend.num_aborts == 0
    assert not any(thread.name == "trackbed-failures" for thread in threading.enumerate())


@pytest.mark.parametrize("aborts", [True, False])
def test_a_program_may_keep_its_process_group(aborts, queued, monkeypatch):
    collectives, backend = queued()
    monkeypatch.setattr(GradientEngine, "_on_gpus", lambda engine: [collectives])

    def train(group):
        wrapper = DistributedDataParallel(layers(4, 2), process_group=group)
        try:
            with wrapper.guarded(abort_on_failure=aborts):
                if group.rank == 1:
                    raise ValueError("the original message")
                while True:
                    wrapper.agree(False)
        except CollectiveError as error:
            return str(error), any("group were ended" in note for note in getattr(error, "__notes__", ()))

    found = run_ranks(2, train)
    assert {text for text, _ in found} == {"training: rank 1: ValueError: the original message"}
    assert [is_told for _, is_told in found] == [aborts] * 2
    assert backend.num_aborts == aborts


def test_one_rank_has_no_thread(queued):
    collectives, _ = queued()

    def train(group):
        with group.guarded("training") as step, freed_from_failures([collectives], step.check, group):
            return [thread.name for thread in threading.enumerate()]

    assert "trackbed-failures" not in run_ranks(1, train)[0]


def test_a_copy_is_waited_for_with_an_eye_on_the_clock():
    copy = QueuedCopy(Queued(0.2))
    began = time.monotonic()
    assert not copy.wait(0.05)
    assert 0.04 < time.monotonic() - began < 0.15
    assert copy.wait()
    assert copy.is_done()
    called = []
    copy.on_done(lambda: called.append(True))
    assert called == [True]
    assert copy.late_ranks() == []


def test_what_lies_on_the_host_is_read_as_it_is():
    tensor = torch.arange(3)
    assert Waiter().read(tensor) is tensor


def test_a_meeting_looks_at_the_others_on_hosts_with_gpus_too(monkeypatch):
    """NCCL's futures are done once their operation is queued."""
    from trackbed.checkpoint.ranks import Meeting

    polls = []

    class Work(Queued):
        def get_future(self):
            future = torch.futures.Future()
            future.set_result(None)
            return future

        def wait(self):
            polls.append("waited")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(Meeting, "poll", lambda self: polls.append("polled"))
    Meeting(None, None, None).wait(Work(0.05))
    assert polls[-1] == "waited"
    assert 5 < polls.count("polled") < 500
