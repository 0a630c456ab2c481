"""Group of the processes that a launcher (torchrun or srun) started, from its environment variables.

Rank 0 serves the rendezvous store, unless torchrun's agent does, at a socket that is bound to a single interface.
"""

import errno
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports

from trackbed.comm.blocking_calls import Worker
from trackbed.comm.group import SOLO, Group
from trackbed.comm.store import Connection
from trackbed.comm.store_group import StoreGroup
from trackbed.comm.torch_group import allow_connections, is_served_by_agent
from trackbed.comm.torch_store import connect_to, share_store
from trackbed.errors import ArgumentError, CollectiveError
from trackbed.kernels import available_threads

DEFAULT_TIMEOUT_SECONDS: Final = 600.0
_SERIAL: Final = count()
_SERVED: Final[list[TCPStore]] = []
"""Store servers of this process, which end with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Rank of this process, and address of the rendezvous store."""

    rank: int
    """In `[0, size)`."""
    size: int
    """Number of ranks, at least 1."""
    host: str
    """Host of the store; a loopback address if all ranks are on one host."""
    port: int
    """In `[1, 65536)`."""
    attempt: str = "0"
    """Identifies this start of the ranks among all that use the same address."""


def group_from_environment(
    timeout_seconds: float | None = None, *, secret: bytes | None = None, shares_port: bool = False
) -> Group:
    """Group of the ranks that torchrun or Slurm's srun started; `SOLO` if this is the only rank or neither was used.

    The ranks connect at their first collective. `torch.distributed` need not be initialised. The rendezvous store
    listens on one interface: loopback if all ranks are on one host, else that of the master's address. If torchrun's
    agent serves a store, the group uses that one, which listens on every interface.

    Args:
        timeout_seconds: see `Group.timeout_seconds`; by default ten minutes.
        secret: see `StoreGroup`; without one, every process that reaches the store is trusted.
        shares_port: True if `torch.distributed` may be initialised later with the same variables. The store then
            listens at MASTER_ADDR, where torch expects one, even if all ranks are on one host.

    Raises:
        ArgumentError: a variable is missing or invalid.
    """
    launch = parse_launch(os.environ)
    if launch is not None and shares_port and "WORLD_SIZE" in os.environ and os.environ.get("MASTER_ADDR"):
        launch = replace(launch, host=os.environ["MASTER_ADDR"])
    if launch is None or launch.size == 1:
        return SOLO
    timeout_seconds = DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
    # The groups of a process are numbered in the order of their creation. It is the same on all ranks, so that the keys
    # of two groups at one address do not mix.
    has_agent = is_served_by_agent()
    if launch.rank == 0 and not has_agent:
        allow_connections()
    return StoreGroup(
        partial(_connect, launch, f"trackbed/{launch.attempt}/{next(_SERIAL)}", timeout_seconds, has_agent=has_agent),
        rank=launch.rank,
        size=launch.size,
        timeout_seconds=timeout_seconds,
        store_host=None if has_agent else 0,
        secret=secret,
    )


def has_several_ranks() -> bool:
    """True if torchrun or srun started more than one rank.

    Raises:
        ArgumentError: a variable is missing or invalid.
    """
    launch = parse_launch(os.environ)
    return launch is not None and launch.size > 1


def threads_per_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the fair share of this process of the CPUs available to it, at least 1.

    torchrun says how many ranks share them; srun gives each its own.
    """
    sharing = environment.get("LOCAL_WORLD_SIZE", "")
    return max(1, available_threads() // int(sharing)) if sharing.isdecimal() and int(sharing) else available_threads()


def parse_launch(environment: Mapping[str, str]) -> Launch | None:
    """Parses the variables of torchrun, or else of Slurm; None if there are none.

    Raises:
        ArgumentError: a variable is missing or invalid.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE")
    elif "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        # A command that a batch script runs without srun has the number of tasks of the job, but is the only one.
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    else:
        return None
    size = _number(environment, names[1], 1, 2**31)
    rank = _number(environment, names[0], 0, size)
    if size == 1:
        return Launch(rank=0, size=1, host=LOOPBACK, port=1)
    host = environment.get("MASTER_ADDR") or first_host(_nodes(environment))
    if _is_one_host(environment, size) and not is_served_by_agent(environment):
        host = LOOPBACK
    return Launch(rank=rank, size=size, host=host, port=_port(environment), attempt=_attempt(environment))


def _nodes(environment: Mapping[str, str]) -> str:
    # A step may have fewer hosts than its job; rank 0 is on the first host of the step.
    return environment.get("SLURM_STEP_NODELIST") or _text(environment, "SLURM_NODELIST", "MASTER_ADDR")


def _port(environment: Mapping[str, str]) -> int:
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT", 1, 2**16)
    _text(environment, "SLURM_JOB_ID", "MASTER_PORT")
    step = _number(environment, "SLURM_STEP_ID", 0, 2**63) if environment.get("SLURM_STEP_ID") else 0
    return step_port(_number(environment, "SLURM_JOB_ID", 0, 2**63), step)


def _is_one_host(environment: Mapping[str, str], size: int) -> bool:
    if "WORLD_SIZE" in environment:
        return environment.get("LOCAL_WORLD_SIZE") == str(size)
    names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    return next((environment[name] for name in names if environment.get(name)), "") == "1"


def _attempt(environment: Mapping[str, str]) -> str:
    names = ("SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(environment[name] for name in names if name in environment) or "0"


def _text(environment: Mapping[str, str], name: str, instead: str) -> str:
    if not environment.get(name):
        raise ArgumentError(f"{instead} must be set for more than one rank, but neither it nor {name} is")
    return environment[name]


def _number(environment: Mapping[str, str], name: str, start: int, stop: int) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit() and start <= int(text) < stop):
        raise ArgumentError(f"{name} must be an integer in [{start}, {stop}), but is {text!r}")
    return int(text)


def _connect(launch: Launch, prefix: str, timeout_seconds: float, *, has_agent: bool) -> Connection:
    host = launch.host if has_agent or launch.rank > 0 else _serve(launch.host, launch.port)
    # Connecting may take as long as the timeout, during which torch ignores Ctrl-C.
    opened = Worker().submit(lambda: connect_to(host, launch.port, timeout_seconds=timeout_seconds))
    try:
        store = opened.result()
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        raise CollectiveError(
            f"{launch.host}:{launch.port}: rank 0 must serve the group's store there, but: {message}"
        ) from None
    return share_store(store, prefix, timeout_seconds=timeout_seconds)


@cache
def _serve(host: str, port: int) -> str:
    """Serves the store until this process ends. Returns the address at which it listens.

    Other ranks may already use a second group while this process, done with the first, has yet to create it. So a
    process that creates two groups serves both from one store; `torch.distributed` uses it, too, if it is
    initialised in this process with the same port.
    """
    listener = listen_at(own_addresses(host, os.environ), port)
    address = str(listener.getsockname()[0])
    timeout = timedelta(seconds=DEFAULT_TIMEOUT_SECONDS)
    # torch owns the descriptor from here on.
    _SERVED.append(
        TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    )
    return address


_FIRST: Final = re.compile(r"(?P<prefix>[^\[\],\s]+)(?:\[(?P<number>\d+)[^\]]*\](?P<suffix>[^,\[]*))?(?:,|$)")
_FIRST_PORT: Final = 10_000
_NUM_PORTS: Final = 20_000
_STEP_STRIDE: Final = 7_919
"""Prime, so that the steps of a job cycle through all ports."""


def first_host(nodes: str) -> str:
    """Returns the first host of a list in Slurm's compressed form.

    >>> first_host("gpu[007-009,12],login1"), first_host("a1,a2"), first_host("rack[1-2]-ib,b")
    ('gpu007', 'a1', 'rack1-ib')
    """
    match = _FIRST.match(nodes.strip())
    if match is None:
        raise ArgumentError(f"SLURM_NODELIST must be a list of hosts, but is {nodes!r}")
    return "".join(part or "" for part in match.group("prefix", "number", "suffix"))


def step_port(job: int, step: int = 0) -> int:
    """Returns the port of the rendezvous store for a step of a job; below the range of ephemeral ports.

    Steps of one job may run side by side on one host, as may jobs with consecutive numbers.

    >>> step_port(123456), step_port(123456, 1), step_port(123457)
    (13456, 21375, 13457)
    """
    return _FIRST_PORT + (job + _STEP_STRIDE * step) % _NUM_PORTS


logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
_ANY_PORT: Final = 9  # nothing is sent to it


def own_addresses(host: str, environment: Mapping[str, str]) -> list[str]:
    """Returns the addresses of this host at which other hosts can reach it, the best first.

    Many systems resolve their own name to a loopback address. The address is then the one from which this host reaches
    the host that launched the Slurm step.

    Args:
        host: name or address of this host.
        environment: environment variables; SLURM_LAUNCH_NODE_IPADDR is optional.

    >>> own_addresses("127.0.0.1", {}), own_addresses("192.0.2.7", {})
    (['127.0.0.1'], ['192.0.2.7'])
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CollectiveError(f"{host}: must be the name or an address of the host of rank 0, but: {error}") from None
    addresses = list(dict.fromkeys(str(place[4][0]) for place in found))
    launcher = environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if launcher and not _is_literal(host) and all(map(_is_loopback, addresses)):
        towards = _address_towards(launcher)
        addresses = addresses if towards is None else [towards]
    if not _is_literal(host) and all(map(_is_loopback, addresses)):
        logger.warning(
            "%s resolves to %s, which other hosts cannot reach: if there are any, set MASTER_ADDR to one that they can",
            host,
            addresses[0],
        )
    return addresses


def listen_at(addresses: list[str], port: int) -> socket.socket:
    """Opens a socket that listens at the first of these addresses that this host has.

    Args:
        addresses: at least one, IPv4 or IPv6.
        port: in `[0, 65536)`; 0 for any free port.
    """
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise CollectiveError(
                f"{address}:{port}: must be free for the ranks' store, but: {error.strerror}"
            ) from None
        return listener
    raise CollectiveError(
        f"{', '.join(addresses)}: must be an address of the host of rank 0, but is none: set MASTER_ADDR to one at "
        "which the other hosts reach it"
    )


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_towards(other: str) -> str | None:
    """Returns the address from which this host sends to `other`; None if there is none but loopback."""
    try:
        family = socket.AF_INET6 if ":" in other else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, _ANY_PORT))  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if _is_loopback(address) else address
