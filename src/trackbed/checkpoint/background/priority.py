"""Priority of threads that work behind the training loop."""

import contextlib
import ctypes
import os
import platform
import sys
import threading
from typing import Final

_NICE: Final = 15
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_THREAD: Final = 1
_IDLE: Final = 3 << 13


def lower_priority() -> None:
    """Lowers the priority of this thread, and of those that it will start: for the processor, and for the disk.

    It does nothing where the system does not allow it. A thread of low priority still gets a part of a busy processor.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, _THREAD, 0, _IDLE)
