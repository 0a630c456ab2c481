"""Running a function in a forked child."""

import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any


def run_in_fork(function: Callable[[], Any]) -> Any:
    """What `function` returns in a child of this process; its exception is raised here."""
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        # NumPy's threads are at rest: the child does not meet their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            try:
                result = pickle.dumps((function(), None))
            except BaseException as error:
                result = _error_bytes(error)
            with os.fdopen(sender, "wb") as pipe:
                pipe.write(result)
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        raw = pipe.read()
    os.waitpid(child, 0)
    result, error = pickle.loads(raw)
    if error is not None:
        raise error
    return result


def _error_bytes(error: BaseException) -> bytes:
    """An exception for the parent, in words where it cannot be pickled."""
    try:
        return pickle.dumps((None, error))
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
