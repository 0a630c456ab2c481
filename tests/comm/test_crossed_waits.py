"""Records of waits: ranks that cannot go on are found, and ranks in one order never are."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from trackbed.comm.crossed_waits import Operation, WaitRecord, find_crossing
from trackbed.comm.store import MemoryStore, StoreTampered
from trackbed.comm.store_group import StoreGroup
from trackbed.comm.torch_store import share_store

DOMAINS = ["a", "b", "c"]


def record_at(program, position, rank=0, members=None):
    """What a rank writes that waits for the operation at a position of its program, a sequence of domains."""
    entered = {}
    for domain in program[: position + 1]:
        entered[domain] = (entered.get(domain, (0,))[0] + 1,)
    domain = program[position]
    return WaitRecord(Operation(domain, entered[domain], f"{domain}{entered[domain][0]}", members), entered)


@given(st.lists(st.sampled_from(DOMAINS), min_size=1, max_size=30), st.data())
def test_ranks_in_one_order_are_never_found_whenever_they_wrote(program, data):
    positions = data.draw(st.lists(st.integers(0, len(program) - 1), min_size=1, max_size=6))
    assert find_crossing({rank: record_at(program, position) for rank, position in enumerate(positions)}) is None


@given(
    st.lists(st.sampled_from(DOMAINS), max_size=20),
    st.permutations(DOMAINS),
    st.lists(st.booleans(), min_size=2, max_size=6),
)
def test_ranks_that_leave_the_order_at_the_same_place_are_found(program, domains, sides):
    first, second, _ = domains
    sides = [*sides, True, False]
    records = {rank: record_at([*program, first if side else second], len(program)) for rank, side in enumerate(sides)}
    found = find_crossing(records)
    assert found is not None
    assert sorted(map(sorted, found)) == sorted(
        [rank for rank, side in enumerate(sides) if side is wanted] for wanted in (True, False)
    )


def test_a_rank_that_does_not_take_part_is_not_waited_for():
    apart = record_at(["a"], 0, members=(0, 2))
    other = record_at(["b"], 0)
    assert find_crossing({0: apart, 1: other}) is None
    assert find_crossing({0: apart, 2: other}) == ([0], [2])


def test_a_rank_that_is_late_is_not_crossed():
    ahead, behind = record_at(["a", "b", "a"], 2), record_at(["a", "b", "a"], 1)
    assert find_crossing({0: ahead, 1: behind}) is None


def test_a_thousand_ranks_at_two_operations_are_found_at_once():
    program = ["a", "b", "c"] * 20
    records = {rank: record_at([*program, "a" if rank % 7 else "b"], 60) for rank in range(1000)}
    first, second = find_crossing(records)
    assert len(first) + len(second) == 1000


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_groups_of_the_same_ranks_have_domains_of_their_own(kind):
    if kind == "memory":
        stores = [MemoryStore(), MemoryStore()]
        ways = [[lambda store=store: store] * 2 for store in stores]
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ways = [[partial(share_store, server, prefix, timeout_seconds=9)] * 2 for prefix in ("one", "other")]
    domains = []
    for ways_of_group in ways:
        ranks = [StoreGroup(way, rank=rank, size=2, timeout_seconds=9) for rank, way in enumerate(ways_of_group)]
        members = [[rank, rank.child("a"), rank.child("b"), rank.child("c").child("a")] for rank in ranks]
        first, second = ([group.domain for group in groups] for groups in members)
        assert first == second
        domains += first
    assert len(set(domains)) == 8


def test_records_are_read_as_they_were_written():
    record = WaitRecord(Operation("a", (1, 2, 1 << 62), "save", (0, 3)), {"a": (1, 2, 1 << 62), "b": (7,)})
    assert WaitRecord.decode(record.encode()) == record
    for raw in (b"", b"7", b"[1]", b'["a",1,"b",null,{}]', b'["a",[1],"b",null,[]]', b'["a",["x"],"b",null,{}]'):
        with pytest.raises(StoreTampered, match="what a rank waits for must be as the rank wrote it"):
            WaitRecord.decode(raw)
