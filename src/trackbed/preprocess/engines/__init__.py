"""Engines that run independent tasks in other processes, on this host or on others, behind one interface."""

from trackbed.preprocess.engines.engine import MAX_RETRIES, Attempt, Engine, FailedAttempt, InProcessEngine, run_tasks
from trackbed.preprocess.engines.processes import ExecutorEngine, ProcessEngine
from trackbed.preprocess.engines.ray_tasks import RayEngine

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
