"""An entry that somebody else publishes, seen late."""

import threading
import time

import pytest

from tests.support.files.small_entries import STEM, arrays, collecting, entry, lazy, open_, request, seeds_in
from trackbed.cache import await_visible
from trackbed.cancellation import polling
from trackbed.errors import CacheError

ADVICE = "see that path_to_cache leads to the same folder on every host"


def wait_for(folder, *, seed=1, **options):
    wanted = request(entry(folder, seed=seed), build=None)
    found = lazy(wanted)
    found.note(await_visible(wanted, advice=ADVICE, **options))
    return found


@pytest.fixture
def later():
    """Does something half a second from now."""
    timers = []

    def start(work):
        timers.append(threading.Timer(0.5, work))
        timers[-1].start()

    yield start
    for timer in timers:
        timer.join()


def test_an_entry_that_is_there_is_opened_at_once(tmp_path):
    open_(tmp_path)
    start = time.monotonic()
    assert seeds_in(wait_for(tmp_path)) == {1}
    assert time.monotonic() - start < 0.2


def test_an_entry_that_appears_late_is_opened_when_it_does(tmp_path, later):
    start = time.monotonic()
    later(lambda: open_(tmp_path))
    assert seeds_in(wait_for(tmp_path, timeout_seconds=20)) == {1}
    assert 0.4 < time.monotonic() - start < 5


def test_a_folder_that_appears_late_as_a_whole_shows_its_entry(tmp_path, later):
    open_(tmp_path / "elsewhere")
    later(lambda: (tmp_path / "elsewhere").rename(tmp_path / "cache"))
    assert seeds_in(wait_for(tmp_path / "cache", timeout_seconds=20)) == {1}


def test_files_that_appear_one_by_one_are_not_opened_before_the_last(tmp_path, later):
    open_(tmp_path / "elsewhere")
    (tmp_path / "cache" / ".trackbed").mkdir(parents=True)
    names = [f".trackbed/{STEM}.json", *(path.name for path in (tmp_path / "elsewhere").glob(f"{STEM}*"))]

    def move():
        for name in names:
            (tmp_path / "elsewhere" / name).rename(tmp_path / "cache" / name)
            time.sleep(0.05)

    later(move)
    assert seeds_in(wait_for(tmp_path / "cache", timeout_seconds=20)) == {1}
    assert not list((tmp_path / "elsewhere").glob(f"{STEM}*"))


def test_an_entry_whose_name_is_taken_is_awaited_aside(tmp_path, later):
    open_(tmp_path)
    later(lambda: open_(tmp_path, seed=2))
    assert seeds_in(wait_for(tmp_path, seed=2, timeout_seconds=20)) == {2}


@pytest.mark.parametrize(("there", "says"), [(False, "found nothing"), (True, "found it damaged: .*sample_index")])
def test_an_entry_that_does_not_appear_in_time_is_an_error_that_says_what_to_check(tmp_path, there, says):
    if there:
        open_(tmp_path)
        (tmp_path / f"{STEM}-sample_index.npy").unlink()
    start = time.monotonic()
    with pytest.raises(CacheError, match=rf"{STEM}-\*\.npy: .* looked for it for 0\.[3-9] s and {says}.*{ADVICE}"):
        wait_for(tmp_path, timeout_seconds=0.3)
    assert 0.3 <= time.monotonic() - start < 1


def test_a_wait_of_no_time_looks_once(tmp_path):
    with pytest.raises(CacheError):
        wait_for(tmp_path, timeout_seconds=0)
    open_(tmp_path)
    assert seeds_in(wait_for(tmp_path, timeout_seconds=0)) == {1}


class Stop(Exception):
    pass


def test_a_poll_ends_the_wait(tmp_path):
    start = time.monotonic()

    def poll(_done):
        if time.monotonic() - start > 0.2:
            raise Stop

    with polling(poll), pytest.raises(Stop):
        wait_for(tmp_path, timeout_seconds=60)
    assert time.monotonic() - start < 5


def test_what_another_rank_built_is_awaited_at_the_first_read(tmp_path, later):
    with collecting() as pending:
        found = open_(tmp_path, build=lambda _: pytest.fail("it is another rank's"))
    pending[0].find_or_build = lambda request, _: await_visible(request, advice=ADVICE)
    later(lambda: open_(tmp_path))
    assert found["sample_index"].tolist() == arrays()["sample_index"].tolist()
