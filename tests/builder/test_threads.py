"""How many threads build at once, and which entries they take."""

import threading
import time

import pytest

from small_entries import arrays, entry, expected, problems
from trackbed.builder.executor import make_all
from trackbed.cache import Recipe, collecting, open_or_build

ROWS = 10


class Site:
    """Entries whose building takes until so many are built at once, or a few seconds, and then long enough for more."""

    def __init__(self, folder, *, blends, others, small=0, at_once=1):
        self._changed = threading.Condition()
        self._at_once = at_once
        self._now = {"blend": 0, "other": 0}
        self.most = {"blend": 0, "other": 0, "all": 0}
        with collecting() as pending:
            for number in range(blends + others + small):
                what = "blend" if number < blends else "other"
                is_small = number >= blends + others
                open_or_build(
                    entry(folder, stem=f"{number:032x}-GPTDataset-train"),
                    expected=lambda: expected(ROWS),
                    build=lambda _allocate, what=what: self._build(what),
                    is_blend=what == "blend",
                    cost=1.0,
                    recipe=Recipe(lambda seeds: [arrays(seed, ROWS) for seed in seeds], 1) if is_small else None,
                )
        self.pending = list(pending)

    def _build(self, what):
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
def test_no_more_entries_are_built_at_once_than_there_are_threads(tmp_path, num_threads, small):
    site = Site(tmp_path / "cache", blends=2, others=6, small=small, at_once=num_threads)
    make_all(site.pending, num_threads=num_threads)
    assert site.most["all"] == num_threads
    assert site.most["blend"] == 1
    assert all(one.is_open for one in site.pending)
    assert problems(tmp_path / "cache") == []


@pytest.mark.parametrize("num_threads", [1, 2])
def test_blends_may_have_a_thread_of_their_own(tmp_path, num_threads):
    site = Site(tmp_path / "cache", blends=2, others=8, at_once=num_threads + 1)
    make_all(site.pending, num_threads=num_threads, blend_has_thread=True)
    assert site.most == {"blend": 1, "other": num_threads, "all": num_threads + 1}


@pytest.mark.parametrize(("blends", "others"), [(0, 0), (3, 0), (0, 1), (1, 0)])
def test_a_few_entries_need_no_threads(tmp_path, blends, others):
    site = Site(tmp_path / "cache", blends=blends, others=others)
    seen = []
    make_all(site.pending, num_threads=1, progress=lambda done, total, share: seen.append((done, total, share)))
    number = blends + others
    assert [done for done, _, _ in seen] == (list(range(number + 1)) if number else [])
    assert all(one.is_open for one in site.pending)


def test_the_first_error_ends_all_threads(tmp_path):
    site = Site(tmp_path / "cache", blends=1, others=40)

    def fail(_allocate):
        msg = "no more"
        raise OSError(msg)

    site.pending[3]._build = fail
    started = time.monotonic()
    with pytest.raises(OSError, match="no more"):
        make_all(site.pending, num_threads=2)
    assert time.monotonic() - started < 1.0
    assert sum(one.is_open for one in site.pending) < 20


def test_what_entries_read_is_asked_for_a_part_ahead(tmp_path):
    seen = []

    def ask(number):
        seen.append(("ahead", number))
        if number == 2:
            msg = "building says what is wrong"
            raise OSError(msg)

    with collecting() as pending:
        for number in range(6):
            open_or_build(
                entry(tmp_path, stem=f"{number:032x}-GPTDataset-train"),
                expected=lambda: expected(ROWS),
                build=lambda _allocate, number=number: seen.append(("built", number)) or arrays(1, ROWS),
                cost=1e9,  # each is a part
                read_ahead=lambda number=number: ask(number),
            )
    make_all(pending[:4], num_threads=1)
    steps = [("ahead", 0), ("ahead", 1), ("built", 0), ("ahead", 2), ("built", 1), ("ahead", 3), ("built", 2)]
    assert seen == [*steps, ("built", 3)]


def test_nothing_is_asked_for_ahead_that_is_there(tmp_path):
    seen = []
    for _ in range(2):
        with collecting() as pending:
            open_or_build(
                entry(tmp_path),
                expected=lambda: expected(ROWS),
                build=lambda _allocate: arrays(1, ROWS),
                read_ahead=lambda: seen.append(1),
            )
        pending[0].find()
        make_all(pending, num_threads=1)
    assert seen == [1]
