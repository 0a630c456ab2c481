"""Records of waits: ranks that cannot go on are found, and ranks in one order never are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.comm.crossed_waits import Operation, WaitRecord, find_crossing
from trackbed.comm.store import StoreTampered

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


def test_records_are_read_as_they_were_written():
    record = WaitRecord(Operation("a", (1, 2, 1 << 62), "save", (0, 3)), {"a": (1, 2, 1 << 62), "b": (7,)})
    assert WaitRecord.decode(record.encode()) == record
    for raw in (b"", b"7", b"[1]", b'["a",1,"b",null,{}]', b'["a",[1],"b",null,[]]', b'["a",["x"],"b",null,{}]'):
        with pytest.raises(StoreTampered, match="what a rank waits for must be as the rank wrote it"):
            WaitRecord.decode(raw)
