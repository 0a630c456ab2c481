"""Groups over the process groups of `torch.distributed`."""

import contextlib
import datetime as dt
import hashlib
import math
import os
import resource
import uuid
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from trackbed.comm.store import Connection
from trackbed.comm.store_group import StoreGroup
from trackbed.errors import ArgumentError, CollectiveError

if TYPE_CHECKING:
    from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]  # torch does not say that it exports


_JOINED: Final[Counter[str]] = Counter()
_KNOWN_PROCESSES: Final["WeakKeyDictionary[Any, dict[int, tuple[int, int]]]"] = WeakKeyDictionary()
"""Processes of the ranks on this host, of each initialisation of `torch.distributed`."""


class TorchGroup(StoreGroup):
    """Group of the processes of a torch process group, over the store that `torch.distributed` was initialised with.

    The backend (nccl, gloo or another) is not used. If several objects are created from one process group, they are
    matched between ranks by the order in which they are first used; children are matched by their names.

    Args:
        process_group: process group; by default all processes.
        timeout_seconds: see `Group.timeout_seconds`; by default the timeout of the process group, or that of the store
            if the backend does not tell.

    Raises:
        ArgumentError: this process does not belong to the group.
        CollectiveError: `torch.distributed` was not initialised.
    """

    def __init__(
        self, process_group: "dist.ProcessGroup | None" = None, *, timeout_seconds: float | None = None
    ) -> None:
        store: Any = _default_store()  # torch's own types do not know its timeout
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ArgumentError(f"process_group: this process must belong to it, but rank {dist.get_rank()} does not")
        ranks = dist.get_process_group_ranks(process_group)
        if timeout_seconds is None:
            timeout_seconds = _timeout_of(process_group or dist.group.WORLD) or store.timeout.total_seconds()
        store_host = ranks.index(0) if 0 in ranks and not is_served_by_agent() else None
        if rank == store_host:
            allow_connections()
        super().__init__(
            partial(_join, _name(process_group, ranks), timeout_seconds),
            rank=rank,
            size=len(ranks),
            timeout_seconds=timeout_seconds,
            store_host=store_host,
            job_ranks=ranks,
            known_processes=_KNOWN_PROCESSES.setdefault(dist.group.WORLD, {}),
        )


_CURRENT: Final["WeakKeyDictionary[dist.ProcessGroup, TorchGroup]"] = WeakKeyDictionary()


def allow_connections() -> None:
    """Lets this process, which serves a store, have as many connections open as the system allows.

    Each rank has some five connections, and the usual limit is 1,024 open files: the ranks from some 200 on would wait
    for a connection in vain.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Refused where the system has another limit beside this one, as on macOS.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def current_group() -> TorchGroup | None:
    """Group of all processes if `torch.distributed` is initialised, else None. Every call returns the same object."""
    world = dist.group.WORLD if dist.is_available() else None
    if world is None:
        return None
    if world not in _CURRENT:
        _CURRENT[world] = TorchGroup()
    return _CURRENT[world]


def check_initialized(where: str, environment: Mapping[str, str] = os.environ) -> None:
    """Checks that a process which torchrun or srun started as one of several has initialised `torch.distributed`.

    Without, each of them would be a job of its own.

    Args:
        where: what needs it, for the error.
        environment: variables of the process.

    Raises:
        ArgumentError: it has not.
    """
    rank, count = ("RANK", "WORLD_SIZE") if "RANK" in environment else ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    size = environment.get(count, "")
    is_one_of_several = rank in environment and size.isdecimal() and int(size) > 1
    if is_one_of_several and current_group() is None:
        raise ArgumentError(
            f"{where}: torch.distributed must be initialised on each of the {size} ranks ({count}), found it is "
            "not; call torch.distributed.init_process_group() first, or give a group: trackbed.comm.SOLO is this rank "
            "alone"
        )


def backends_of(process_group: Any) -> dict[str, str]:
    """Backend of a process group for each type of device, such as `{"cpu": "gloo", "cuda": "nccl"}`."""
    config = dist.get_backend_config(process_group)
    pairs = (one.partition(":") for one in config.split(","))
    return {device.strip(): backend.strip() for device, _, backend in pairs}


def abort_backend(process_group: Any, device: torch.device) -> None:
    """Ends the operations of a process group on some device that are running or queued, on this rank.

    The process group is of no more use then. A backend that cannot end operations is left alone.
    """
    backend = process_group._get_backend(device)
    abort = getattr(backend, "abort", None)
    if abort is not None:
        abort()


def device_for(process_group: Any, *, near: torch.device | None = None) -> torch.device:
    """Device from which a process group sends tensors that may lie on any: the CPU, if it can.

    Args:
        process_group: process group of torch, however its backends were given; None for all processes.
        near: device of tensors that the group sends otherwise, if there are any. Without it, that to which the group is
            bound (`init_process_group(device_id=...)`), or the current one.
    """
    process_group = process_group or dist.group.WORLD
    kinds = list(backends_of(process_group))
    if "cpu" in kinds:
        return torch.device("cpu")
    if near is not None and near.type in kinds:
        return near
    bound = getattr(process_group, "bound_device_id", None)
    if bound is not None and bound.type in kinds:
        return torch.device(bound)
    kind = kinds[0]
    module = getattr(torch, kind, None)
    has_devices = hasattr(module, "current_device") and module.is_available()  # type: ignore[union-attr]
    return torch.device(kind, module.current_device() if has_devices else 0)  # type: ignore[union-attr]


def is_served_by_agent(environment: Mapping[str, str] = os.environ) -> bool:
    """True if torchrun, rather than the process of rank 0, hosts the store."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _join(name: str, timeout_seconds: float) -> Connection:
    """Opens a store below a prefix that no other group has used, even before a restart or on a shared server."""
    # Some builds of torch have no stores; the import fails only if one is needed.
    from trackbed.comm.torch_store import TimeoutStore, share_store

    # Counted when a group first connects, which all ranks do in the same order: so equal numbers are one group.
    _JOINED[name] += 1
    shared = _default_store()
    # Connections of our own lack torch's prefixes. A unique prefix, agreed on below torch's, takes their place.
    prefixed = TimeoutStore(shared, lambda: shared, request_timeout_seconds=timeout_seconds / 2)
    prefix = prefixed.set_first(f"trackbed/{name}/{_JOINED[name]}", uuid.uuid4().hex.encode()).decode()
    return share_store(shared, prefix, timeout_seconds=timeout_seconds)


def _name(process_group: "dist.ProcessGroup | None", ranks: list[int]) -> str:
    """Name of a process group: equal on its ranks, and different from that of any other group of ranks."""
    name = "all" if process_group is None else process_group.group_name
    return f"{name}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"


def _default_store() -> "TorchStore":
    """Returns the store that all process groups share."""
    if not (dist.is_available() and dist.is_initialized()):
        raise CollectiveError("torch.distributed: must be initialised to form a group of its processes, but is not")
    try:
        return dist.distributed_c10d._get_default_store()
    except AttributeError:
        raise CollectiveError(
            f"{dist.__name__}: the store of the default process group must be there, found none"
        ) from None


def _timeout_of(process_group: Any) -> float | None:
    """Timeout of a process group; None if torch does not tell."""
    for device in ("cpu", "cuda"):
        try:
            options = process_group._get_backend(torch.device(device)).options
            timeout: dt.timedelta = options._timeout  # noqa: SLF001
        except (AttributeError, RuntimeError):
            continue
        seconds = timeout.total_seconds()
        return seconds if 0 < seconds < math.inf else None
    return None
