"""How many threads build at once, and which entries they take."""

import threading
import time

import pytest

from tests.support.files.small_entries import SmallKind, arrays, entry, expected, lazy, problems, request
from trackbed.builder.executor import Executor

ROWS = 10


class Site:
    """Entries whose building takes until so many are built at once, or a few seconds, and then long enough for more."""

    def __init__(self, folder, *, blends, others, small=0, at_once=1):
        self._changed = threading.Condition()
        self._at_once = at_once
        self._now = {"blend": 0, "other": 0}
        self.most = {"blend": 0, "other": 0, "all": 0}
        self.fails_at = None
        small_kind = SmallKind(cost=1.0)
        self.wanted = []
        for number in range(blends + others + small):
            what = "blend" if number < blends else "other"
            one = entry(folder, stem=f"{number:032x}-GPTDataset-train")
            self.wanted.append(
                lazy(
                    small_kind.request(one, 1)
                    if number >= blends + others
                    else request(
                        one,
                        build=lambda _allocate, what=what, number=number: self._build(what, number),
                        wants=lambda: expected(ROWS),
                        is_blend=what == "blend",
                        cost=1e9,
                    )
                )
            )

    def _build(self, what, number):
        if number == self.fails_at:
            raise OSError("no more")
        with self._changed:
            self._now[what] += 1
            self._note()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most["all"] >= self._at_once, timeout=5)
        time.sleep(0.02)
        with self._changed:
            self._now[what] -= 1
        return arrays(1, ROWS)

    def _note(self):
        for what, count in self._now.items():
            self.most[what] = max(self.most[what], count)
        self.most["all"] = max(self.most["all"], sum(self._now.values()))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("small", [0, 40])
def test_one_alone_builds_blends_on_a_thread_of_their_own(tmp_path, num_threads, small):
    site = Site(tmp_path / "cache", blends=2, others=8, small=small, at_once=num_threads + 1)
    Executor(site.wanted, num_threads=num_threads).run()
    assert site.most == {"blend": 1, "other": num_threads, "all": num_threads + 1}
    assert all(one.is_resolved for one in site.wanted)
    assert problems(tmp_path / "cache") == []


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_among_several_ranks_no_more_entries_are_built_at_once_than_there_are_threads(tmp_path, num_threads):
    site = Site(tmp_path / "cache", blends=2, others=8, small=40, at_once=num_threads)
    numbers = iter(range(1000))
    Executor(site.wanted, num_ranks=2, num_threads=num_threads).run(numbers.__next__)
    assert site.most["all"] == num_threads
    assert all(one.is_resolved for one in site.wanted)


@pytest.mark.parametrize(("blends", "others"), [(0, 0), (3, 0), (0, 1), (1, 0)])
def test_a_few_entries_need_no_threads(tmp_path, blends, others):
    site = Site(tmp_path / "cache", blends=blends, others=others)
    seen = []
    Executor(site.wanted, num_threads=1, progress=lambda *part: seen.append(part)).run()
    number = blends + others
    assert [done for done, _, _ in seen] == (list(range(number + 1)) if number else [])
    assert not seen or seen[-1] == (number, number, pytest.approx(1.0))
    assert all(one.is_resolved for one in site.wanted)


def test_the_first_error_ends_all_threads(tmp_path):
    site = Site(tmp_path / "cache", blends=1, others=40)
    site.fails_at = 3
    started = time.monotonic()
    with pytest.raises(OSError, match="no more"):
        Executor(site.wanted, num_threads=2).run()
    assert time.monotonic() - started < 1.0
    assert sum(one.is_resolved for one in site.wanted) < 20


class Reading(SmallKind):
    """Reports what is read ahead and what is built."""

    def __init__(self, seen):
        super().__init__(lambda seeds: [seen.append(("built", seed)) or arrays(seed) for seed in seeds], cost=1e9)
        self._seen = seen

    def is_small(self, request):
        return False

    def read_ahead(self, request):
        self._seen.append(("ahead", request.ingredients.seed))
        if request.ingredients.seed == 2:
            raise OSError("building says what is wrong")


def test_what_entries_read_is_asked_for_a_chunk_ahead(tmp_path):
    seen = []
    kind = Reading(seen)
    wanted = [
        lazy(kind.request(entry(tmp_path, stem=f"{number:032x}-GPTDataset-train"), number)) for number in range(4)
    ]
    Executor(wanted, num_threads=1).run()
    steps = [("ahead", 0), ("ahead", 1), ("built", 0), ("ahead", 2), ("built", 1), ("ahead", 3), ("built", 2)]
    assert seen == [*steps, ("built", 3)]


def test_a_long_chunk_is_not_taken_while_another_is_built(tmp_path):
    seen = []
    kind = Reading(seen)
    wanted = [
        lazy(kind.request(entry(tmp_path, stem=f"{number:032x}-GPTDataset-train"), number)) for number in range(3)
    ]
    Executor(wanted, num_ranks=2, num_threads=1).run(iter(range(100)).__next__)
    assert seen == [(what, number) for number in range(3) for what in ("ahead", "built")]
