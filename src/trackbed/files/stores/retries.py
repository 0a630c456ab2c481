"""Attempts of a request: which failures may pass, how long to wait, and when to give up."""

import asyncio
import os
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores.address import Address, redact
from trackbed.files.stores.event_loop import OutOfTimeError

_Result = TypeVar("_Result")
_DEFAULT_SECONDS: Final = 60.0
ATTEMPTS_IN_TIME: Final = 4
"""Attempts that the time of a call is enough for, if each stalls."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_MOST_SHOWN: Final = 300
_ANSWER: Final = re.compile(r"status code: (\d{3}[A-Za-z ]*)")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_PASSING_STATUSES: Final = (408, 425, 429)
"""Statuses below 500 that a further attempt may change."""
_FINAL_NAMES: Final = (
    "AlreadyExistsError",
    "InvalidPathError",
    "NotSupportedError",
    "PermissionDeniedError",
    "PermissionError",
    "UnauthenticatedError",
    "UnknownConfigurationKeyError",
    "ValueError",
)
_FINAL_WORDS: Final = ("redirect", "StartTooLarge")


class WrongAnswerError(Exception):
    """An answer is not what was asked for; the message must not contain secrets."""


def timeout_seconds() -> float:
    """Returns the seconds that a call may take: `TRACKBED_STORE_TIMEOUT`, or 60.

    Raises:
        ArgumentError: the variable is not a number above 0.
    """
    found = os.environ.get("TRACKBED_STORE_TIMEOUT", "")
    try:
        seconds = float(found) if found else _DEFAULT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentError(f"TRACKBED_STORE_TIMEOUT must be a number of seconds above 0, found {found!r}")
    return seconds


async def retry_until(deadline: float, request: Callable[[], Awaitable[_Result]], address: Address) -> _Result:
    """Makes a request, and makes it again while it fails in a way that may pass.

    Args:
        deadline: time of `time.monotonic` at which it is given up.
        request: makes one attempt.
        address: the object, for errors.
    """
    pause, last = _FIRST_PAUSE, "no answer"
    while True:
        try:
            # The limits of the client begin anew with each attempt; the deadline is that of the whole call. Without it,
            # an attempt that begins late would keep the program beyond its time.
            async with asyncio.timeout_at(deadline):
                return await request()
        except (StoreError, ArgumentError, TypeError, AttributeError):
            raise
        except Exception as error:  # noqa: BLE001 - obstore's errors have no common class, and quote URLs
            final, last = _final_error(error, address), _describe(error) if str(error) else last
        # Outside of the handler, so that no error carries obstore's, which quotes headers and URLs.
        if final is not None:
            raise final
        # At random, so that the ranks of a job, which a store has refused at the same moment, do not all come back at
        # the same moment again.
        pause = min(2 * pause, _LONGEST_PAUSE)
        wait = pause * random.uniform(0.5, 1)
        # No attempt would end in time after this pause: the error is raised now, with the last failure.
        if time.monotonic() + wait >= deadline:
            raise OutOfTimeError(address.text, last)
        await asyncio.sleep(wait)


async def make_once(request: Callable[[], Awaitable[_Result]], address: Address) -> _Result:
    """Makes a request that the library repeats by itself."""
    try:
        return await request()
    except (StoreError, ArgumentError):
        raise
    except Exception as error:  # noqa: BLE001 - as above
        final = _final_error(error, address) or StoreError(
            f"{address.text}: the store must do what it is asked for, found: {_describe(error)}"
        )
    raise final


def is_forbidden(error: Exception) -> bool:
    """True if the store refuses the request, without a reason."""
    return _status(error) == 403 and _CODE.search(str(error)) is None


def is_out_of_range(error: Exception) -> bool:
    """True if the store says that a range begins after the end of the object."""
    return _status(error) == 416 or "StartTooLarge" in str(error)


def _final_error(error: Exception, address: Address) -> Exception | None:
    """Returns the error to raise if a further attempt would fail, too."""
    name, status, text = type(error).__name__, _status(error), _describe(error)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(2, "there is no such object", address.text)
    if name == "PreconditionError" or status == 412:
        return replaced(address)
    if (
        name in _FINAL_NAMES
        or (status is not None and status < 500 and status not in _PASSING_STATUSES)
        or any(word in str(error) for word in _FINAL_WORDS)
    ):
        return StoreError(f"{address.text}: the store must grant the request, found: {text}")
    return None


def replaced(address: Address) -> StoreError:
    """Returns the error for an object that has another stamp than the one that was opened."""
    return StoreError(f"{address.text}: the object must be the one that was opened, found another one in its place")


def _status(error: Exception) -> int | None:
    found = _ANSWER.search(str(error))
    return int(found[1][:3]) if found else None


def _describe(error: Exception) -> str:
    """Returns one line of an error, without secrets.

    Of an answer, only status and code: its text may repeat what was signed, and by which key.
    """
    answered = _ANSWER.search(str(error))
    if answered is not None:
        code = _CODE.search(str(error))
        return f"status {answered[1].strip()}" + (f", {code[1]}" if code else "")
    text = str(error).split("Debug source:")[0]
    return redact(" ".join(text.split()))[:_MOST_SHOWN] or type(error).__name__
