"""Contract that every group must keep."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackbed.errors import ArgumentError, CacheError, CollectiveError

QUICK = settings(max_examples=settings().max_examples // 5)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def on_two_threads(function, other):
    """Returns the results or exceptions of `function()`, and of `other()` on a thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(result_of(other)))
    thread.start()
    mine = result_of(function)
    thread.join()
    return mine, found[0]


def result_of(function):
    """Returns the result of `function()`, or the exception that it raises."""
    try:
        return function()
    except BaseException as error:
        return error


class GroupContract:
    """Base of test classes, which define `run(size, function, **options)`: the results of `function(group)` by rank."""

    sizes = (1,)

    @pytest.fixture(autouse=True)
    def _in_time(self):
        began = time.monotonic()
        yield
        assert time.monotonic() - began < 60

    def every(self, function, **options):
        """Yields each size, with the results or exceptions of its ranks."""
        for size in self.sizes:
            yield size, self.run(size, lambda group: result_of(lambda: function(group)), **options)

    def test_ranks_are_numbered(self):
        for size, ranks in self.every(lambda group: (group.rank, group.size)):
            assert ranks == [(rank, size) for rank in range(size)]

    def test_a_gather_returns_the_values_of_all_ranks_in_rank_order(self):
        for size, found in self.every(lambda group: group.all_gather({"rank": group.rank, "pair": (1, None)})):
            assert found == [[{"rank": rank, "pair": [1, None]} for rank in range(size)]] * size

    def test_a_status_is_seen_by_all_ranks_after_the_next_heartbeat(self):
        def work(group):
            before = group.statuses()
            group.barrier()
            group.publish_status([group.rank, "of", group.size])
            group.barrier()
            after = group.statuses()
            group.barrier()
            return before, after

        for size, found in self.every(work):
            for before, after in found:
                assert before == [None] * size
                assert after in ([[rank, "of", size] for rank in range(size)], [None])  # Solo keeps no status

    def test_a_counter_returns_each_number_once_over_all_ranks_and_threads(self):
        def work(group):
            taken = []
            for name in ("one", "other", "one"):
                take, numbers = group.counter(name), []
                threads = [
                    threading.Thread(target=lambda: numbers.extend(take() for _ in range(5)))  # noqa: B023
                    for _ in range(2)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                taken.append(numbers)
                group.barrier()
            return taken

        for size, found in self.every(work):
            for taken in zip(*found, strict=True):
                assert sorted(sum(taken, [])) == list(range(10 * size))

    def test_a_combined_value_is_the_same_on_all_ranks(self):
        for size, found in self.every(lambda group: group.combine([group.rank], lambda values: sum(values, []))):
            assert found == [list(range(size))] * size

    def test_a_broadcast_returns_the_value_of_its_source(self):
        for size, found in self.every(lambda group: [group.broadcast(group.rank, source=k) for k in range(group.size)]):
            assert found == [list(range(size))] * size

    def test_only_the_sources_value_need_be_json(self):
        for size, found in self.every(lambda group: group.broadcast(7 if group.rank == 0 else object())):
            assert found == [7] * size

    @pytest.mark.parametrize("source", [-1, 5, 6])
    def test_a_source_that_is_no_rank_is_rejected(self, source):
        for size, found in self.every(lambda group: group.broadcast(0, source=source)):
            assert [(type(error), str(error)) for error in found] == [
                (ArgumentError, f"source must be a rank in [0, {size}), but is {source}")
            ] * size

    def test_values_of_any_json_shape_come_back(self):
        size = min(2, max(self.sizes))

        @QUICK
        @given(values=st.lists(json_values, max_size=8))
        def check(values):
            found = self.run(size, lambda group: [group.all_gather([group.rank, value]) for value in values])
            assert found == [[[[rank, value] for rank in range(size)] for value in values]] * size

        check()

    def test_no_rank_passes_a_barrier_before_all_have_arrived(self):
        for size in self.sizes:
            arrived = []

            def work(group, arrived=arrived):
                time.sleep(0.02 * group.rank)
                arrived.append(group.rank)
                group.barrier()
                return len(arrived)

            assert self.run(size, work) == [size] * size

    def test_no_rank_leaves_a_step_before_all_have_finished(self):
        for size in self.sizes:
            done = []

            def work(group, done=done):
                with group.guarded("working") as step:
                    for item in range(5 * group.rank):
                        time.sleep(0.002)
                        step.poll(item)
                    done.append(group.rank)
                return len(done)

            assert self.run(size, work) == [size] * size

    def test_collectives_run_one_after_another_and_inside_steps(self):
        def work(group):
            found = []
            for turn in range(5):
                with group.guarded("outside") as outside:
                    outside.poll(0)
                    found.append(group.broadcast(turn, source=turn % group.size))
                    with group.guarded("inside") as inside:
                        inside.poll(0)
                        found.append(group.all_gather(group.rank))
                group.barrier()
                group.agree("the turn", turn)
            return found

        for size, found in self.every(work):
            assert found == [[part for turn in range(5) for part in (turn, list(range(size)))]] * size

    def test_ranks_agree_on_equal_values_in_any_order_of_keys(self):
        def agree(group):
            value = {"a": 1, "b": [2]}
            return group.agree("the plan", value if group.rank % 2 else dict(reversed(value.items())))

        for size, found in self.every(agree):
            assert found == [None] * size

    def test_a_child_has_the_ranks_and_the_timeout_of_its_parent(self):
        def work(group):
            child = group.child("side")
            return child.rank == group.rank, child.size == group.size, child.timeout_seconds == group.timeout_seconds

        for size, found in self.every(work):
            assert found == [(True, True, True)] * size

    @pytest.mark.parametrize("name", ["", "/", "a/b", "side/"])
    def test_a_child_needs_a_name_that_is_one_part_of_a_key(self, name):
        for size, found in self.every(lambda group: group.child(name)):
            assert [str(error) for error in found] == [
                f"name must have at least one character, and no '/', but is {name!r}"
            ] * size
            assert {type(error) for error in found} == {ArgumentError}

    def test_the_steps_of_a_group_and_its_children_never_mix(self):
        turns = 30

        def steps(group, who):
            found = []
            for turn in range(turns):
                with group.guarded(who) as step:
                    step.poll(0)
                    take = group.counter("it")
                    found.append(group.all_gather([who, turn, group.rank]))
                    found.append([take() for _ in range(2)])
                group.publish_status([who, turn])
                group.agree("the turn", [who, turn])
                found.append(all(status is None or status[0] == who for status in group.statuses()))
            return found

        def work(group):
            child = group.child("side")
            same_name = child.child("side")
            return on_two_threads(
                lambda: steps(group, "parent"),
                lambda: on_two_threads(lambda: steps(child, "child"), lambda: steps(same_name, "grandchild")),
            )

        for size, ranks in self.every(work):
            for who, found in (
                ("parent", [parent for parent, _ in ranks]),
                ("child", [child for _, (child, _) in ranks]),
                ("grandchild", [grandchild for _, (_, grandchild) in ranks]),
            ):
                for turn in range(turns):
                    gathered, taken, has_own_statuses = zip(
                        *(one[3 * turn : 3 * turn + 3] for one in found), strict=True
                    )
                    assert list(gathered) == [[[who, turn, rank] for rank in range(size)]] * size
                    assert sorted(sum(taken, [])) == list(range(2 * size))
                    assert all(has_own_statuses)

    @pytest.mark.parametrize("waits", ["parent", "child"])
    def test_a_group_and_its_child_do_not_wait_for_each_other(self, waits):
        def work(group):
            done = threading.Event()

            def wait(group):
                if group.rank == group.size - 1:
                    done.wait(60)
                group.barrier()

            def go_on(group):
                for _ in range(20):
                    group.barrier()
                done.set()

            child = group.child("side")
            waiting, going = (group, child) if waits == "parent" else (child, group)
            return on_two_threads(lambda: wait(waiting), lambda: go_on(going))

        for size, found in self.every(work):
            assert found == [(None, None)] * size


class SharedGroupContract(GroupContract):
    """Contract of groups that can have more than one rank."""

    sizes = (1, 2, 3, 5)

    def fails(self, size, work, **options):
        """Returns the common text of the CollectiveErrors of all ranks, and their causes."""
        found = self.run(size, lambda group: result_of(lambda: work(group)), **options)
        assert [type(error) for error in found] == [CollectiveError] * size, found
        assert len({str(error) for error in found}) == 1
        return str(found[0]), [error.__cause__ for error in found]

    @pytest.mark.parametrize("when", ["at entry", "inside", "at exit"])
    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_a_failure_is_raised_on_every_rank_with_its_message(self, failing, when):
        original = CacheError("/x/y: must be whole, but is not")

        def work(group):
            with group.guarded("building the indices") as step:
                if group.rank == failing and when == "at entry":
                    raise original
                for item in range(10_000 if group.rank == (failing + 1) % 3 else 20):
                    time.sleep(0.002)
                    step.poll(item)
                    if group.rank == failing and when == "inside" and item == 10:
                        raise original
                if group.rank == failing:
                    raise original

        text, causes = self.fails(3, work)
        assert text == f"building the indices: rank {failing}: CacheError: /x/y: must be whole, but is not"
        assert causes == [original if rank == failing else None for rank in range(3)]

    def test_two_ranks_that_fail_at_once_are_both_named_on_all_ranks(self):
        def work(group):
            group.barrier()
            with group.guarded("building"):
                if group.rank in (1, 3):
                    raise ValueError(f"number {group.rank}")

        text, _ = self.fails(5, work)
        assert text == "building: rank 1: ValueError: number 1; rank 3: ValueError: number 3"

    def test_ranks_with_the_same_cause_are_listed_together(self):
        def work(group):
            group.barrier()
            with group.guarded("building"):
                raise OSError("full")

        text, _ = self.fails(3, work)
        assert text == "building: rank 0, rank 1 and rank 2: OSError: full"

    def test_a_rank_that_was_stopped_is_not_named_even_if_it_raises_its_own_error(self):
        def work(group):
            with group.guarded("building") as step:
                if group.rank == 1:
                    raise ValueError("no")
                try:
                    while True:
                        time.sleep(0.002)
                        step.poll(0)
                except Exception as error:
                    raise CacheError("it went wrong") from error

        text, causes = self.fails(3, work)
        assert text == "building: rank 1: ValueError: no"
        assert [type(cause) for cause in causes] == [type(None), ValueError, type(None)]

    def test_a_rank_that_swallows_the_stop_raises_too(self):
        def work(group):
            with group.guarded("building") as step:
                if group.rank == 1:
                    raise ValueError("no")
                for _ in range(100):
                    time.sleep(0.002)
                    try:
                        step.poll(0)
                    except Exception:
                        break

        assert self.fails(3, work)[0] == "building: rank 1: ValueError: no"

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_ranks_that_wait_inside_an_inner_step_for_a_failed_rank_are_stopped(self, failing):
        def work(group):
            with group.guarded("outside"):
                group.barrier()
                with group.guarded("inside") as step:
                    if group.rank == (failing + 1) % 3:
                        while True:
                            time.sleep(0.002)
                            step.poll(0)
                    if group.rank == failing:
                        raise ValueError("no")
                    group.all_gather(1)

        assert (
            self.fails(3, work)[0]
            == f"outside: rank {failing}: CollectiveError: inside: rank {failing}: ValueError: no"
        )

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_ranks_that_wait_at_a_gather_for_a_failed_rank_are_stopped(self, failing):
        def work(group):
            with group.guarded("building") as step:
                group.barrier()
                if group.rank == failing:
                    raise ValueError("no")
                if group.rank == (failing + 1) % 3:
                    while True:
                        time.sleep(0.002)
                        step.poll(0)
                group.all_gather(1)

        assert self.fails(3, work)[0] == f"building: rank {failing}: ValueError: no"

    def test_a_value_that_is_not_json_is_an_error_on_every_rank(self):
        text, causes = self.fails(3, lambda group: group.all_gather({1} if group.rank == 1 else 1))
        assert text == "all_gather: rank 1: TypeError: Type is not JSON serializable: set"
        assert isinstance(causes[1], TypeError)

    def test_ranks_that_differ_are_named_with_both_values(self):
        text, _ = self.fails(5, lambda group: group.agree("the plan", {"tasks": 7 if group.rank in (1, 4) else 8}))
        assert text == (
            'the plan: must be the same on every rank, but ranks 1 and 4 have {"tasks":7}, '
            'and ranks 0, 2 and 3 have {"tasks":8}'
        )

    def test_the_group_is_usable_after_a_failure(self):
        def work(group):
            found = []
            for turn in range(6):
                try:
                    with group.guarded("building") as step:
                        group.barrier()
                        if group.rank == turn % group.size:
                            raise ValueError(turn)
                        if turn % 2:
                            step.poll(0)
                            group.barrier()
                except CollectiveError as error:
                    found.append(str(error))
                found.append(group.all_gather(turn))
            return found

        for size, found in self.every(work):
            expected = [
                part
                for turn in range(6)
                for part in (f"building: rank {turn % size}: ValueError: {turn}", [turn] * size)
            ]
            assert found == [expected] * size

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
    def test_an_interrupt_propagates_unchanged_after_the_others_are_notified(self, error):
        def work(group):
            with group.guarded("building") as step:
                if group.rank == 1:
                    raise error
                while True:
                    time.sleep(0.002)
                    step.poll(0)

        found = self.run(3, lambda group: result_of(lambda: work(group)))
        assert found[1] is error
        words = f"building: rank 1: {type(error).__name__}" + (": 3" if error.args else "")
        assert [str(found[0]), str(found[2])] == [words] * 2
        assert type(found[0]) is type(found[2]) is CollectiveError

    def test_a_rank_that_is_silent_is_named_and_the_group_is_broken(self):
        late = threading.Event()

        def work(group):
            group.barrier()
            if group.rank == 1:
                late.wait(30)
            found = [result_of(group.barrier), result_of(lambda: group.all_gather(1))]
            late.set()
            return found

        found = self.run(3, work, timeout_seconds=2)  # of one second, a busy machine takes half for an answer
        texts = {str(error) for errors in found for error in errors}
        assert texts == {"barrier: rank 1 sent no heartbeat for 2 s, while ranks 0 and 2 waited"}
        assert {type(error) for errors in found for error in errors} == {CollectiveError}

    def test_a_rank_that_is_silent_inside_a_step_is_waited_for_once(self):
        release = threading.Event()

        def work(group):
            with group.guarded("building") as step:
                if group.rank == 0:
                    while not release.is_set():
                        time.sleep(0.01)
                        step.poll(0)
                if group.rank == 1:
                    release.wait(30)
                group.all_gather(1)

        def timed(group):
            began = time.monotonic()
            text = str(result_of(lambda: work(group)))
            if group.rank != 0:
                release.set()
            return text, time.monotonic() - began

        found = self.run(3, timed, timeout_seconds=1)
        assert {text for text, _ in found} == {"all_gather: rank 1 sent no heartbeat for 1 s, while rank 2 waited"}
        assert all(seconds < 2 for _, seconds in found)

    def test_a_rank_that_polls_may_exceed_the_timeout(self):
        def work(group):
            with group.guarded("building") as step:
                if group.rank == 1:
                    for item in range(160):
                        time.sleep(0.02)
                        step.poll(item)
            return True

        assert self.run(3, work, timeout_seconds=1) == [True] * 3

    def test_a_rank_that_stops_polling_is_named(self):
        release = threading.Event()

        def work(group):
            with group.guarded("building") as step:
                if group.rank == 1:
                    for item in range(75):
                        time.sleep(0.02)
                        step.poll(item)
                    release.wait(30)

        def timed(group):
            began = time.monotonic()
            found = result_of(lambda: work(group))
            release.set()
            return str(found), time.monotonic() - began

        found = self.run(3, timed, timeout_seconds=1)
        assert {text for text, _ in found} == {"building: rank 1 sent no heartbeat for 1 s, while ranks 0 and 2 waited"}
        # 1.5 s of work, then the timeout and at most a fifth of it; the rest is for a loaded machine.
        assert all(2.3 < seconds < 4 for _, seconds in found), found

    def test_a_name_of_a_child_is_used_once(self):
        def work(group):
            children = [group.child("side"), group.child("other")]
            return str(result_of(lambda: group.child("side"))), len(children)

        for size, found in self.every(work):
            text = "name must be one that no other child of this group has, but is 'side', which one has"
            assert found == [(text, 2)] * size

    @pytest.mark.parametrize("failing", [0, 1, 2])
    @pytest.mark.parametrize("fails", ["parent", "child"])
    def test_a_failure_ends_the_steps_of_its_group_alone(self, fails, failing):
        def work(group):
            failed = threading.Event()

            def fail(group):
                with group.guarded("failing") as step:
                    if group.rank == failing:
                        raise ValueError("no")
                    while True:
                        time.sleep(0.002)
                        step.poll(0)

            def fail_then_go_on(group):
                text = str(result_of(lambda: fail(group)))
                failed.set()
                return text, group.all_gather(1)

            def work_on(group):
                with group.guarded("working") as step:
                    while not failed.is_set():
                        time.sleep(0.002)
                        step.poll(0)
                return group.all_gather(2)

            child = group.child("side")
            one, other = (group, child) if fails == "parent" else (child, group)
            return on_two_threads(lambda: fail_then_go_on(one), lambda: work_on(other))

        text = f"failing: rank {failing}: ValueError: no"
        assert self.run(3, work) == [((text, [1] * 3), [2] * 3)] * 3

    @pytest.mark.parametrize("is_silent_in", ["parent", "child"])
    def test_a_silent_rank_breaks_the_group_in_which_others_wait_and_no_other(self, is_silent_in):
        release = threading.Event()

        def work(group):
            def wait(group):
                if group.rank == 1:
                    release.wait(30)
                text = str(result_of(group.barrier))
                release.set()
                return text

            def work_on(group):
                while not any(group.all_gather(release.is_set())):
                    time.sleep(0.01)
                return group.all_gather(1)

            child = group.child("side")
            one, other = (group, child) if is_silent_in == "parent" else (child, group)
            return on_two_threads(lambda: wait(one), lambda: work_on(other))

        text = "barrier: rank 1 sent no heartbeat for 1 s, while ranks 0 and 2 waited"
        assert self.run(3, work, timeout_seconds=1) == [(text, [1] * 3)] * 3
