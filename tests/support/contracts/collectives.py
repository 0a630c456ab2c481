"""Contract that all collectives keep: cases that every rank of a group runs, and that raise where it is broken."""

import itertools
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from trackbed.comm import Group
from trackbed.comm.shared_memory import SharedMemory
from trackbed.errors import CollectiveError
from trackbed.grads.collectives import Collectives, Label, SharedMemoryCollectives
from trackbed.grads.collectives.protocol import MAX_NUMBERS, read_together

SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-14}
MEMORY_BYTES = 1 << 23


@dataclass
class Rank:
    """Argument of a case: the collectives of one rank, and buffers on which they work."""

    collectives: Collectives
    group: Group
    """The same ranks, for messages."""
    memory: SharedMemory | None = None
    """Memory for buffers; None for collectives that take any."""
    promised: frozenset[str] = frozenset({"all_reduce", "reduce_scatter"})
    """Operations that add in the stated order."""
    used_bytes: int = field(default=0)

    @classmethod
    def sharing(cls, group):
        """A rank that shares its memory with the other ranks of a group."""
        memory = SharedMemory.create(MEMORY_BYTES)
        collectives = SharedMemoryCollectives.connect(group, [memory])
        assert not isinstance(collectives, str), collectives
        return cls(collectives, group, memory)

    @property
    def number(self):
        return self.collectives.rank()

    @property
    def size(self):
        return self.collectives.size()

    def buffer(self, content):
        """A buffer with some content, at the same place on every rank."""
        if self.memory is None:
            return content.clone()
        start = self.used_bytes
        self.used_bytes += -(-content.numel() * content.itemsize // 64) * 64
        data = self.memory.view(np.uint8)[start : start + content.numel() * content.itemsize]
        buffer = torch.from_numpy(data).view(content.dtype)
        buffer.copy_(content)
        return buffer

    def numbers(self, seed, count, dtype, rank=None):
        """Numbers that a rank (by default this one) puts into its buffer."""
        rank = self.number if rank is None else rank
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        if dtype == torch.uint8:
            return torch.randint(0, 256, (count,), dtype=dtype, generator=generator)
        return (torch.randn(count, generator=generator, dtype=torch.float64) * 3).to(dtype)

    def sum(self, seed, count, dtype, scale, average):
        """The sum over all ranks in the stated order, rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        terms = [(self.numbers(seed, count, dtype, rank) * scale).to(wide) for rank in range(self.size)]
        while len(terms) > 1:
            half = (len(terms) + 1) // 2
            terms = [terms[i] + terms[i + half] if i + half < len(terms) else terms[i] for i in range(half)]
        return (terms[0] / self.size if average else terms[0]).to(dtype)

    def check_sum(self, operation, found, wanted):
        if operation in self.promised:
            assert same(found, wanted), f"{operation} of {wanted.dtype}"
        else:
            tolerance = TOLERANCES[wanted.dtype]
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=4 * tolerance)


def same(one, other):
    """Equal to the last bit."""
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def ranks_and_sizes_are_numbered(rank):
    assert rank.number == rank.group.rank
    assert rank.size == rank.group.size


def an_all_reduce_sums_on_every_rank(rank):
    ways = itertools.product(SUMMED, (1, 63, 1000, 4097), (1.0, 1 / rank.size, 1 / 3), (False, True))
    for seed, (dtype, count, scale, average) in enumerate(ways):
        buffer = rank.buffer(rank.numbers(seed, count, dtype))
        assert rank.collectives.all_reduce([buffer], scale=scale, average=average, label=Label(seed)).wait()
        rank.check_sum("all_reduce", buffer, rank.sum(seed, count, dtype, scale, average))


def a_reduce_scatter_sums_the_own_shard_and_scales_the_others(rank):
    for seed, (dtype, scale, average) in enumerate(itertools.product(SUMMED, (1.0, 1 / 3), (False, True))):
        count = 12 * 17
        mine = rank.numbers(seed, count, dtype)
        buffer = rank.buffer(mine)
        rank.collectives.reduce_scatter([buffer], scale=scale, average=average, label=Label(seed)).wait()
        shard = slice(count // rank.size * rank.number, count // rank.size * (rank.number + 1))
        rank.check_sum("reduce_scatter", buffer[shard], rank.sum(seed, count, dtype, scale, average)[shard])
        rest, scaled = buffer.clone(), mine * scale
        rest[shard] = scaled[shard]
        assert same(rest, scaled), f"other shards, {dtype}"


def an_all_gather_brings_all_shards(rank):
    for seed, dtype in enumerate((*SUMMED, torch.uint8)):
        count = 12 * 17
        buffer = rank.buffer(rank.numbers(seed, count, dtype))
        rank.collectives.all_gather([buffer], label=Label(seed)).wait()
        shards = [rank.numbers(seed, count, dtype, owner).chunk(rank.size)[owner] for owner in range(rank.size)]
        assert same(buffer, torch.cat(shards))


def an_operation_takes_several_buffers_even_empty_ones(rank):
    counts = (24, 0, 12, 1200)
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        buffers = [rank.buffer(rank.numbers(seed, count, torch.float32)) for seed, count in enumerate(counts)]
        options = {} if kind == "all_gather" else {"scale": 0.5, "average": False}
        getattr(rank.collectives, kind)(buffers, **options, label=Label()).wait()
        for seed, (buffer, count) in enumerate(zip(buffers, counts, strict=True)):
            shard = slice(count // rank.size * rank.number, count // rank.size * (rank.number + 1))
            if kind == "all_gather":
                assert same(buffer[shard], rank.numbers(seed, count, torch.float32)[shard])
            else:
                shard = shard if kind == "reduce_scatter" else slice(None)
                rank.check_sum(kind, buffer[shard], rank.sum(seed, count, torch.float32, 0.5, False)[shard])


def a_broadcast_replaces_tensors_of_any_shape(rank):
    source = rank.size - 1

    def tensors(owner):
        strided = rank.numbers(3, 60, torch.float32, owner).view(6, 10)
        return [
            rank.numbers(1, 24, torch.float32, owner).view(2, 3, 4),
            torch.tensor(1.5 + owner, dtype=torch.float64),
            strided.t(),
            strided.clone()[:, ::2],
            torch.zeros(0, 4),
            rank.numbers(2, 5, torch.bfloat16, owner),
            rank.numbers(2, 7, torch.uint8, owner),
            torch.arange(3) + owner,
            rank.numbers(4, 800_001, torch.float32, owner),
            torch.nn.Parameter(rank.numbers(5, 6, torch.float32, owner)).data,
        ]

    mine, theirs = tensors(rank.number), tensors(source)
    rank.collectives.broadcast(mine, source=source).wait()
    for found, wanted in zip(mine, theirs, strict=True):
        assert found.shape == wanted.shape
        assert same(found, wanted), f"shape {list(wanted.shape)}"
    rank.collectives.broadcast([], source=0).wait()


def an_exchange_sends_the_numbers_of_all_ranks(rank):
    for count in (1, 3, MAX_NUMBERS):
        numbers = np.arange(count) * (rank.number + 1) - 2**62
        exchange = rank.collectives.exchange(numbers)
        exchange.work.wait()
        found = exchange.read()
        assert found.dtype == np.int64
        assert found.tolist() == [(np.arange(count) * (other + 1) - 2**62).tolist() for other in range(rank.size)]


def an_exchange_sends_numbers_of_the_device_behind_those_of_the_host(rank):
    more = rank.buffer(torch.arange(5.0) + 10 * rank.number).to(torch.int64)
    exchange = rank.collectives.exchange(np.array([-1, 2**62]), more=more)
    exchange.work.wait()
    assert exchange.read().tolist() == [[-1, 2**62, *range(10 * other, 10 * other + 5)] for other in range(rank.size)]


def exchanges_are_read_together(rank):
    exchanges = [
        rank.collectives.exchange(np.array([rank.number])),
        rank.collectives.exchange(np.zeros(0, dtype=np.int64), more=torch.tensor([rank.number, 3])),
        rank.collectives.exchange(np.arange(3), label=Label(4, 1)),
    ]
    for exchange in exchanges:
        exchange.work.wait()
    copied = []
    found = read_together(exchanges, lambda tensor: copied.append(len(tensor)) or tensor)
    assert [rows.tolist() for rows in found] == [exchange.read().tolist() for exchange in exchanges]
    assert found[1].tolist() == [[other, 3] for other in range(rank.size)]
    assert len(copied) <= 1


def an_exchange_sends_numbers_as_they_were(rank):
    numbers = np.array([rank.number])
    exchange = rank.collectives.exchange(numbers)
    numbers[:] = 99
    exchange.work.wait()
    assert exchange.read()[:, 0].tolist() == list(range(rank.size))


def many_operations_may_be_under_way(rank):
    count, steps = 1200, 30
    buffers = [rank.buffer(rank.numbers(step, count, torch.float32)) for step in range(steps)]
    gathered = [rank.buffer(torch.full((12,), float(rank.number * 100 + step))) for step in range(steps)]
    works, exchanges = [], []
    for step in range(steps):
        works += [
            rank.collectives.all_reduce([buffers[step]], scale=0.5, average=False, label=Label(step)),
            rank.collectives.all_gather([gathered[step]], label=Label(step)),
        ]
        exchanges.append(rank.collectives.exchange(np.array([step, rank.number])))
    for work in reversed(works):
        work.wait()
    for step in range(steps):
        exchanges[step].work.wait()
        assert exchanges[step].read().tolist() == [[step, other] for other in range(rank.size)]
        rank.check_sum("all_reduce", buffers[step], rank.sum(step, count, torch.float32, 0.5, False))
        wanted = torch.arange(rank.size).repeat_interleave(12 // rank.size) * 100.0 + step
        assert same(gathered[step], wanted)


def a_work_tells_when_it_is_done(rank):
    calls = []
    called = threading.Event()
    buffer = rank.buffer(torch.ones(100_000))
    work = rank.collectives.all_reduce([buffer], scale=1.0, average=False, label=Label())
    work.on_done(lambda: (calls.append(work.is_done()), called.set()))
    while not work.wait(0.01):
        pass
    assert work.is_done()
    assert work.wait()
    assert work.late_ranks() == []
    assert called.wait(10)
    assert len(calls) == 1
    assert buffer[0] == rank.size


def several_threads_may_wait_for_a_work(rank):
    for _ in range(20):
        buffers = [rank.buffer(torch.full((12,), float(rank.number))) for _ in range(16)]
        work = rank.collectives.all_gather(buffers, label=Label())
        errors = []

        def wait(work=work, errors=errors):
            try:
                work.wait()
            except Exception as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert all(buffer[-1] == rank.size - 1 for buffer in buffers)


CASES = {
    case.__name__: case
    for case in (
        ranks_and_sizes_are_numbered,
        an_all_reduce_sums_on_every_rank,
        several_threads_may_wait_for_a_work,
        a_reduce_scatter_sums_the_own_shard_and_scales_the_others,
        an_all_gather_brings_all_shards,
        an_operation_takes_several_buffers_even_empty_ones,
        a_broadcast_replaces_tensors_of_any_shape,
        an_exchange_sends_the_numbers_of_all_ranks,
        an_exchange_sends_numbers_of_the_device_behind_those_of_the_host,
        exchanges_are_read_together,
        an_exchange_sends_numbers_as_they_were,
        many_operations_may_be_under_way,
        a_work_tells_when_it_is_done,
    )
}


def error_of(work):
    try:
        work.wait(20)
    except CollectiveError as error:
        return str(error)
    return "no error"


def ranks_at_different_operations_are_both_named(rank):
    if rank.size == 1:
        return
    buffer = rank.buffer(torch.ones(12))
    if rank.number == rank.size - 1:
        work = rank.collectives.all_gather([buffer], label=Label(7, 3))
    else:
        work = rank.collectives.all_reduce([buffer], scale=1.0, average=False, label=Label(7, 2))
    last = f"rank {rank.size - 1} is at the all-gather of bucket 3 in step 7"
    rest = "is at the all-reduce of bucket 2 in step 7"
    found = error_of(work)
    assert last in found, found
    assert rest in found, found
    rank.group.barrier()


def ranks_in_different_steps_are_told_apart(rank):
    if rank.size == 1:
        return
    buffer = rank.buffer(torch.ones(12))
    found = error_of(rank.collectives.all_reduce([buffer], scale=1.0, average=False, label=Label(rank.number > 0, 0)))
    assert "rank 0 is at the all-reduce of bucket 0 in step 0" in found, found
    assert "in step 1" in found, found
    rank.group.barrier()


def a_wait_names_the_ranks_that_are_late(rank):
    last = rank.size - 1
    buffer = rank.buffer(torch.ones(12))
    if rank.number != last:
        work = rank.collectives.all_reduce([buffer], scale=1.0, average=False, label=Label())
        assert not work.wait(0.05)
        assert not work.is_done()
        while work.late_ranks() != [last]:  # until all others have begun
            time.sleep(0.01)
    rank.group.barrier()
    if rank.number == last:
        work = rank.collectives.all_reduce([buffer], scale=1.0, average=False, label=Label())
    assert work.wait(20)
    assert work.late_ranks() == []
    assert buffer.tolist() == [rank.size] * 12


def stopping_ends_waits(rank):
    if rank.size == 1:
        return
    if rank.number == 0:
        works = [
            rank.collectives.all_reduce([rank.buffer(torch.ones(12))], scale=1.0, average=False, label=Label(step))
            for step in range(3)
        ]
        assert not works[0].wait(0.05)
        rank.collectives.stop()
        for work in works:
            assert "the collectives have been stopped" in error_of(work)
            assert work.is_done()
    rank.group.barrier()


def the_last_reference_ends_the_thread(rank):
    if rank.size == 1:
        return
    if rank.number == 0:
        work = rank.collectives.exchange(np.array([1])).work
        rank.collectives = None
        assert "the collectives have been stopped" in error_of(work)
    rank.group.barrier()


SHARED_MEMORY_CASES = CASES | {
    case.__name__: case
    for case in (
        ranks_at_different_operations_are_both_named,
        ranks_in_different_steps_are_told_apart,
        a_wait_names_the_ranks_that_are_late,
        stopping_ends_waits,
        the_last_reference_ends_the_thread,
    )
}
