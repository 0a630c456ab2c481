"""Groups of processes whose collectives raise an error instead of hanging."""

from trackbed.comm.group import SOLO, Group, Solo, Step
from trackbed.comm.threads import run_ranks

__all__ = ["SOLO", "Group", "Solo", "Step", "run_ranks"]
