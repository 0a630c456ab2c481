"""Bytes that a save and a disagreement send through the store, beside the backend of a process group."""

import threading

import pytest
import torch

from tests.comm.counting import CountingStore
from tests.support.models.wrapped import layers
from trackbed.checkpoint import ShardedTensor, open_checkpoint, ranks, save
from trackbed.comm import SOLO, run_ranks
from trackbed.comm.store import MemoryStore
from trackbed.errors import CollectiveError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig

NUM_RANKS = 64
MOST_BYTES = NUM_RANKS * (64 << 10)


class Over:
    """A collective that is over."""

    def get_future(self):
        return self

    def is_completed(self):
        return True

    def wait(self):
        return True


class Backend:
    """Process group of ranks that are threads, with the two collectives that a save needs."""

    def __init__(self, size):
        self.sent = [None] * size
        self.barrier = threading.Barrier(size)
        self.num_bytes = 0
        self.rank_of_thread = {}

    def exchange(self, mine):
        rank = self.rank_of_thread[threading.get_ident()]
        self.sent[rank] = mine.clone()
        self.barrier.wait()
        found = list(self.sent)
        self.barrier.wait()
        return rank, found

    def all_gather(self, received, mine, *, group, async_op):
        _, found = self.exchange(mine)
        for target, content in zip(received, found, strict=True):
            target.copy_(content)
        self.num_bytes += mine.numel()
        return Over()

    def gather(self, mine, received, *, group, group_dst, async_op):
        rank, found = self.exchange(mine)
        assert (received is not None) == (rank == group_dst == 0) or rank != 0
        for target, content in zip(received or [], found, strict=False):
            target.copy_(content)
        return Over()


@pytest.fixture
def backend(monkeypatch):
    made = Backend(NUM_RANKS)

    def ranks_of(group):
        if group is None:
            return SOLO, None
        made.rank_of_thread[threading.get_ident()] = group.rank
        return group, made

    monkeypatch.setattr(ranks, "_ranks", ranks_of)
    monkeypatch.setattr(ranks, "device_for", lambda group: torch.device("cpu"))
    monkeypatch.setattr(ranks.dist, "all_gather", made.all_gather)
    monkeypatch.setattr(ranks.dist, "gather", made.gather)
    return made


def bytes_of(work):
    """Bytes that all ranks send and receive."""
    shared, connections = MemoryStore(), []

    def connect():
        connections.append(CountingStore(shared))
        return connections[-1]

    run_ranks(NUM_RANKS, work, connect=connect, timeout_seconds=600)
    return sum(connection.bytes.total() for connection in connections)


@pytest.mark.parametrize("num_tensors", [1, 3, 200])
def test_a_save_sends_few_bytes_through_the_store(num_tensors, backend, tmp_path):
    def state(rank, value):
        return {
            f"layer {number}": ShardedTensor.from_rank_offsets(
                f"layer {number}", torch.full((4,), value), (0, rank, NUM_RANKS)
            )
            for number in range(num_tensors)
        }

    num_bytes = bytes_of(lambda group: save(state(group.rank, float(group.rank)), tmp_path / "it", group=group))
    assert num_bytes < MOST_BYTES, num_bytes / MOST_BYTES
    assert torch.equal(open_checkpoint(tmp_path / "it")["layer 0"][:], torch.arange(64.0).repeat_interleave(4))


def test_models_that_differ_send_few_bytes_through_the_store():
    """The model has 200 parameters."""

    def wrap(group):
        model = layers(*[4] * 100) if group.rank != 5 else layers(*[4] * 99, 3)
        with pytest.raises(CollectiveError, match=r"rank 5 has parameter '0.weight' of shape"):
            DistributedDataParallel(model, DistributedDataParallelConfig(bucket_size=1000), process_group=group)

    num_bytes = bytes_of(wrap)
    assert num_bytes < MOST_BYTES, num_bytes / MOST_BYTES
