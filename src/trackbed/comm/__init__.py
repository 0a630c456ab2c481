"""Groups of processes."""

from trackbed.comm.group import SOLO, Group, Solo

__all__ = ["SOLO", "Group", "Solo"]
