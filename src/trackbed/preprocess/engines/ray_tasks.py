"""Engine that runs tasks on a cluster of Ray."""

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError
from trackbed.preprocess.engines.engine import ASKED, Attempt, run_pickled

_REFRESH_SECONDS: Final = 5.0
_CONNECT_SECONDS: Final = 10.0


class RayEngine:
    """Tasks of Ray, each on one core. Ray does not retry them, so that failed attempts can be shown.

    Args:
        ray: the module.
        work: picklable function of a task.
        is_owner: True if this engine has connected to the cluster, and disconnects from it.
    """

    def __init__(self, ray: Any, work: Callable[[Any], Any], *, is_owner: bool) -> None:
        self._ray = ray
        self._work = ray.put(pickle.dumps(work))
        self._run = ray.remote(max_retries=0, num_cpus=1)(run_pickled)
        self._is_owner = is_owner
        self._in_flight: dict[Any, int] = {}
        self._slots = 1
        self._counted = -_REFRESH_SECONDS

    @classmethod
    def open(cls, work: Callable[[Any], Any], *, workers: int) -> "RayEngine":
        """Connects to the cluster of `RAY_ADDRESS`, or starts one on this host, unless Ray is already in use.

        Args:
            work: picklable function of a task.
            workers: number of cores of a cluster that is started.
        """
        ray: Any = require("ray", where="the engine ray", extra="ray")
        is_owner = not ray.is_initialized()
        if is_owner:
            address = os.environ.get("RAY_ADDRESS") or "local"
            mine = {"num_cpus": workers, "include_dashboard": False} if address == "local" else {}
            _check_answers(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level="warning", **mine)
            except (ConnectionError, RuntimeError, ValueError) as error:
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ArgumentError(
                    f"RAY_ADDRESS: must be the address of a running cluster of Ray, found {address!r}: {first}"
                ) from error
        return cls(ray, work, is_owner=is_owner)

    @property
    def slots(self) -> int:
        """Number of cores of all hosts, counted every few seconds."""
        if time.monotonic() - self._counted >= _REFRESH_SECONDS:
            self._slots = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
            self._counted = time.monotonic()
        return self._slots

    def ask_hosts(self, task: Any) -> list[Attempt]:
        """Runs a task on every host that has cores."""
        strategies = self._ray.util.scheduling_strategies
        raw = pickle.dumps(task)
        for node in self._ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU"):
                there = strategies.NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
                reference = self._run.options(num_cpus=0, scheduling_strategy=there).remote(self._work, raw)
                self._in_flight[reference] = ASKED
        ended: list[Attempt] = []
        while self._in_flight:
            ended += self.wait(1)
        return ended

    def start(self, number: int, task: Any) -> None:
        """Submits a task."""
        self._in_flight[self._run.remote(self._work, pickle.dumps(task))] = number

    def wait(self, timeout_seconds: float) -> list[Attempt]:
        """Returns the attempts that have ended."""
        if not self._in_flight:
            return []
        references = list(self._in_flight)
        done, rest = self._ray.wait(references, num_returns=1, timeout=timeout_seconds)
        if done and rest:
            more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0)
            done += more
        return [self._end(reference) for reference in done]

    def close(self) -> None:
        """Kills the tasks in flight, and disconnects from a cluster that this engine has connected to."""
        for reference in self._in_flight:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.cancel(reference, force=True)
        self._in_flight.clear()
        if self._is_owner:
            self._ray.shutdown()

    def _end(self, reference: Any) -> Attempt:
        number = self._in_flight.pop(reference)
        errors = self._ray.exceptions
        try:
            found = self._ray.get(reference)
        except errors.RayTaskError as error:  # the function could not be called at all
            return Attempt(number, error=RuntimeError(str(error)))
        except errors.RayError as error:
            first = str(error).strip().splitlines() or [""]
            return Attempt(number, death=f"{type(error).__name__}: {first[0]}".rstrip(": "))
        return Attempt(number, result=found.result, error=found.error)


def _check_answers(address: str) -> None:
    """Raises ArgumentError if nothing listens at a host and port, for which Ray itself waits for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ArgumentError(
            f"RAY_ADDRESS: must be the address of a running cluster of Ray, found {address!r}: {error}"
        ) from None
