"""Parsing of Slurm's environment variables. Pure."""

import re
from typing import Final

from trackbed.errors import ArgumentError

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
