"""Python's collector of cycles, paused while a plan makes many objects at once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses the collector, unless the program has switched it off. A decorator, too.

    It would look at each of the hundred thousands of objects of a plan several times, and find none to free: that took
    a third of a load of 20,000 tensors.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
