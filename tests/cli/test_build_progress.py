import io
import sys

from trackbed.cli.build_progress import show_building
from trackbed.comm import SOLO, run_ranks


def lines_of(size, parts, monkeypatch):
    """Returns the lines on stderr after each process has reported its part."""
    seen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setattr("trackbed.cli.build_progress._SECONDS_BETWEEN_LINES", 0.0)

    def work(group):
        with show_building(group) as progress:
            if group.rank > 0:
                progress(*parts[group.rank])
            group.barrier()
            if group.rank == 0:
                progress(*parts[0])
            group.barrier()

    if size == 1:
        work(SOLO)
    else:
        run_ranks(size, work)
    return seen.getvalue().splitlines()


def test_one_process_says_how_far_it_is(monkeypatch):
    (line,) = lines_of(1, [(10, 40, 0.25)], monkeypatch)
    assert line.startswith("built 10 of 40 indices, ")
    assert line.endswith(" s left")


def test_the_first_process_says_how_far_all_are(monkeypatch):
    (line,) = lines_of(3, [(10, 50, 0.25), (1, 50, 0.05), (7, 50, 0.1)], monkeypatch)
    assert line.startswith("built 18 of 50 indices, ")
