"""Looking in on a kernel while it runs."""

from collections.abc import Callable

__all__ = ["Poll"]

Poll = Callable[[int], object] | None
"""Called with the number of items that are done, at least every 50 ms; what it raises ends the kernel, whose outputs
then mean nothing. Ctrl-C ends it with or without one."""
