"""What every engine must do."""

import os
import signal
import time
from pathlib import Path

import pytest

from trackbed.errors import FormatError, TrackbedError
from trackbed.preprocess.engines import FailedAttempt, run_tasks


class Work:
    """Function of a task: a pair of a command and its argument. Unknown commands are errors."""

    def __call__(self, task):
        command, argument = task
        return getattr(self, command)(argument)

    def double(self, number):
        return 2 * number

    def sleep_and_return(self, seconds):
        time.sleep(seconds)
        return seconds

    def refuse(self, message):
        raise FormatError(message)

    def break_down(self, message):
        raise KeyError(message)

    def die(self, _):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_once(self, path):
        if not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "survived"

    def report_and_sleep(self, path):
        Path(path).write_text(str(os.getpid()))
        time.sleep(60)


class OpensWithError:
    """Cannot be unpickled."""

    def __reduce__(self):
        return _refuse_to_open, ()


def _refuse_to_open():
    raise TrackbedError("another version")


class EngineContract:
    """Derive from this class, and give `open_engine(work)` as a context manager; two tasks run at once."""

    survives_deaths = True
    """False if the engine has no workers."""
    kills_tasks = True
    """False if tasks that run cannot be ended."""

    def run(self, tasks, on_failure=lambda failed: None):
        with self.open_engine(Work()) as engine:
            return list(run_tasks(engine, enumerate(tasks), on_failure=on_failure))

    def test_every_task_gives_its_result_once(self):
        found = self.run([("double", number) for number in range(20)])
        assert sorted(found) == [(number, 2 * number) for number in range(20)]

    def test_no_tasks_give_no_results(self):
        assert self.run([]) == []

    def test_a_bounded_number_of_tasks_is_taken_before_results_are(self):
        taken = 0

        def tasks():
            nonlocal taken
            for number in range(100):
                taken += 1
                yield number, ("double", number)

        with self.open_engine(Work()) as engine:
            results = run_tasks(engine, tasks(), on_failure=lambda failed: None)
            next(results)
            assert taken <= 4 * engine.slots
            assert len(list(results)) == 99

    def test_a_long_task_does_not_hold_up_the_others(self):
        with self.open_engine(Work()) as engine:
            tasks = enumerate([("sleep_and_return", 0.5), *[("double", number) for number in range(4)]])
            found = [number for number, _ in run_tasks(engine, tasks, on_failure=lambda failed: None)]
        assert sorted(found) == list(range(5))
        assert found[-1] == 0 or engine.slots == 1

    def test_an_error_of_the_library_is_raised_as_it_is(self):
        with pytest.raises(FormatError, match=r"^a\.jsonl:7: bad$"):
            self.run([("double", 1), ("refuse", "a.jsonl:7: bad")])

    def test_any_other_error_ends_the_run_too(self):
        with pytest.raises(Exception, match="unexpected"):
            self.run([("double", 1), ("break_down", "unexpected")])

    def test_every_host_is_asked(self):
        with self.open_engine(Work()) as engine:
            assert {attempt.result for attempt in engine.ask_hosts(("double", 4))} == {8}
            (attempt, *_) = engine.ask_hosts(("refuse", "not here"))
            assert isinstance(attempt.error, FormatError)
            assert str(attempt.error) == "not here"

    def test_work_that_cannot_be_unpickled_is_an_error(self):
        with pytest.raises(TrackbedError, match="another version"), self.open_engine(OpensWithError()) as engine:
            list(run_tasks(engine, [(0, ("double", 1))], on_failure=lambda failed: None))

    def test_a_task_whose_worker_died_is_tried_again(self, tmp_path):
        if not self.survives_deaths:
            pytest.skip("there are no workers")
        failures = []
        tasks = [("double", 1), ("die_once", str(tmp_path / "died")), ("double", 2)]
        found = dict(self.run(tasks, on_failure=failures.append))
        assert found == {0: 2, 1: "survived", 2: 4}
        assert all(isinstance(failed, FailedAttempt) and failed.attempt == 1 for failed in failures)
        assert any("die_once" in failed.task for failed in failures)

    def test_a_task_that_kills_every_worker_ends_the_run_by_its_name(self):
        if not self.survives_deaths:
            pytest.skip("there are no workers")
        failures = []
        with pytest.raises(TrackbedError, match=r"^\('die', 7\): .* 4 have died"):
            self.run([*[("double", number) for number in range(6)], ("die", 7)], on_failure=failures.append)
        assert [failed.attempt for failed in failures if "die" in failed.task] == [1, 2, 3]

    def test_close_ends_the_tasks_that_run(self, tmp_path):
        if not self.kills_tasks:
            pytest.skip("tasks that run cannot be ended")
        with self.open_engine(Work()) as engine:
            engine.start(0, ("report_and_sleep", str(tmp_path / "pid")))
            while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
                engine.wait(0.01)
            process = int((tmp_path / "pid").read_text())
        for _ in range(500):
            if not is_alive(process):
                return
            time.sleep(0.02)
        pytest.fail("the task is still running")


def is_alive(process):
    """True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
