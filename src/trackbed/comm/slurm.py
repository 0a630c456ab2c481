"""What Slurm's variables say. Pure."""

import re
from typing import Final

from trackbed.errors import ArgumentError

__all__ = ["first_host", "step_port"]

_FIRST: Final = re.compile(r"(?P<prefix>[^\[\],\s]+)(?:\[(?P<number>\d+)[^\]]*\](?P<suffix>[^,\[]*))?(?:,|$)")
_FIRST_PORT: Final = 10_000
_NUM_PORTS: Final = 20_000
_STEP_STRIDE: Final = 7_919
"""Prime, so that the steps of a job go through all ports."""


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's short form.

    Raises:
        ArgumentError: it is none.

    >>> first_host("gpu[007-009,12],login1"), first_host("a1,a2"), first_host("rack[1-2]-ib,b")
    ('gpu007', 'a1', 'rack1-ib')
    """
    match = _FIRST.match(nodes.strip())
    if match is None:
        msg = f"SLURM_NODELIST must be a list of hosts, but is {nodes!r}"
        raise ArgumentError(msg)
    return "".join(part or "" for part in match.group("prefix", "number", "suffix"))


def step_port(job: int, step: int = 0) -> int:
    """The port at which the ranks of a step of a job meet; below those that systems hand out by themselves.

    Steps of one job may run beside each other on one host, as may jobs with consecutive numbers.

    >>> step_port(123456), step_port(123456, 1), step_port(123457)
    (13456, 21375, 13457)
    """
    return _FIRST_PORT + (job + _STEP_STRIDE * step) % _NUM_PORTS
