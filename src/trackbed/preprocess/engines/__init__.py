"""Engines that run independent tasks in other processes, on this host or on others, behind one interface."""

from trackbed.preprocess.engines.engine import Attempt, Engine, InProcessEngine
from trackbed.preprocess.engines.executor import ExecutorEngine
from trackbed.preprocess.engines.processes import ProcessEngine
from trackbed.preprocess.engines.ray_tasks import RayEngine
from trackbed.preprocess.engines.run_tasks import MAX_RETRIES, FailedAttempt, run_tasks

__all__ = [
    "MAX_RETRIES",
    "Attempt",
    "Engine",
    "ExecutorEngine",
    "FailedAttempt",
    "InProcessEngine",
    "ProcessEngine",
    "RayEngine",
    "run_tasks",
]
