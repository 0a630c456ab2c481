import contextlib
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from tests.support.contracts.engine import EngineContract, Work
from trackbed.errors import ArgumentError, TrackbedError
from trackbed.preprocess.engines import ExecutorEngine, InProcessEngine, ProcessEngine, RayEngine, run_tasks

make_pool = partial(ProcessPoolExecutor, 2, mp_context=get_context("spawn"))


class TestInProcess(EngineContract):
    survives_deaths = kills_tasks = False

    @staticmethod
    def open_engine(work):
        return contextlib.closing(InProcessEngine(pickle.loads(pickle.dumps(work))))


class TestProcesses(EngineContract):
    @staticmethod
    def open_engine(work):
        return contextlib.closing(ProcessEngine(work, workers=2))


class TestExecutorThatIsReplaced(EngineContract):
    kills_tasks = False

    @staticmethod
    def open_engine(work):
        return contextlib.closing(ExecutorEngine(work, make_pool, slots=2))


class TestThreads(EngineContract):
    survives_deaths = kills_tasks = False

    @staticmethod
    @contextlib.contextmanager
    def open_engine(work):
        with ThreadPoolExecutor(2) as pool, contextlib.closing(ExecutorEngine(work, pool, slots=2)) as engine:
            yield engine


@pytest.mark.usefixtures("local_ray")
class TestRay(EngineContract):
    @staticmethod
    def open_engine(work):
        return contextlib.closing(RayEngine.open(work, workers=2))

    @pytest.mark.slow
    def test_a_task_that_kills_every_worker_ends_the_run_by_its_name(self):
        super().test_a_task_that_kills_every_worker_ends_the_run_by_its_name()


def test_a_pool_of_processes_that_a_dead_worker_broke_is_an_error_that_names_the_task():
    refused = pytest.raises(TrackbedError, match=r"^\('die', 7\): the executor must take this task, .* a function")
    with refused, make_pool() as pool, contextlib.closing(ExecutorEngine(Work(), pool, slots=2)) as engine:
        list(run_tasks(engine, [(0, ("die", 7))], on_failure=lambda failed: None))


def test_a_task_that_was_beside_one_that_kills_is_not_blamed():
    tasks = [("sleep_and_return", 0.1)] * 8
    tasks[3] = ("die", 7)
    blamed = pytest.raises(TrackbedError, match=r"^\('die', 7\): ")
    with blamed, contextlib.closing(ExecutorEngine(Work(), make_pool, slots=2)) as engine:
        list(run_tasks(engine, enumerate(tasks), on_failure=lambda failed: None))


def test_an_address_without_a_cluster_is_named_at_once(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ArgumentError, match=r"RAY_ADDRESS: must be .* found '127\.0\.0\.1:1': .*refused"):
        RayEngine.open(len, workers=1)
