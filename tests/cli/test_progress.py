import itertools

from rich.progress import Progress

from trackbed.cli import progress
from trackbed.cli.progress import cumulative, show_progress, size_of


def test_without_a_terminal_there_is_a_line_every_ten_seconds(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 20.0, 21.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with show_progress("reading") as report:
        for done in (1, 20, 21, 40):
            report(done * 1_000_000, 80_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 25% of 80.0 MB, 1.0 MB/s, 60 s left",
        "reading: 50% of 80.0 MB, 1.0 MB/s, 40 s left",
    ]


def test_bytes_of_an_earlier_run_do_not_count_for_the_rate_and_counts_are_shown(capsys, monkeypatch):
    clock = iter([0.0, 0.0, 10.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with show_progress("reading") as report:
        report(70_000_000, 80_000_000)
        report.count("failed attempts")
        report(75_000_000, 80_000_000)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "reading: 94% of 80.0 MB, 0.5 MB/s, 10 s left, failed attempts 1"


def test_the_speed_of_a_bar_counts_the_bytes_of_this_run_only(monkeypatch):
    clock = itertools.count(0.0, 10.0)
    bars = Progress(get_time=lambda: next(clock), auto_refresh=False)
    bar = progress._Bar("reading", bars)
    for done in (70_000_000, 75_000_000, 80_000_000):
        bar(done, 100_000_000)
    (task,) = bars.tasks
    assert (task.completed, task.total) == (80_000_000, 100_000_000)
    assert 0 < task.speed < 1_000_000


def test_steps_become_sums():
    seen = []
    step = cumulative(lambda done, total: seen.append((done, total)), 10)
    step(3)
    step(4)
    assert seen == [(3, 10), (7, 10)]


def test_the_size_of_files_leaves_out_those_that_are_missing(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert size_of([str(tmp_path / "a"), str(tmp_path / "gone")]) == 3
