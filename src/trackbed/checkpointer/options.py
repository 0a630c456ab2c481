"""Checks of the options and arguments of a `Checkpointer`."""

import os
from pathlib import Path
from typing import Any

from trackbed.checkpoint.ranks import Meeting
from trackbed.checkpointer.runs import AnyRun, LocalRun, run_in
from trackbed.checkpointer.steps import MOST_STEP, StepNames
from trackbed.errors import ArgumentError
from trackbed.files.stores import parse_address


def mirror_run(run: AnyRun, mirror: str | Path) -> AnyRun:
    """The second place.

    Raises:
        ArgumentError: it is the first one, or that is in a store.
    """
    found = run_in(mirror)
    if not isinstance(run, LocalRun):
        raise ArgumentError(f"mirror: the first folder must be on a file system, found {run}")
    if isinstance(found, LocalRun):
        first, second = (Path(os.path.realpath(str(one))) for one in (run, found))
        if first.is_relative_to(second) or second.is_relative_to(first):
            raise ArgumentError(f"mirror: must be a folder beside that of the checkpoints, {run}, found {found}")
    return found


def check_pattern(run: AnyRun, names: StepNames) -> None:
    """Checks that the names of steps can be parts of an address.

    Raises:
        ArgumentError: they cannot.
    """
    path = run.path(names.name(0))
    if isinstance(path, str):
        try:
            parse_address(path)
        except ArgumentError as error:
            raise ArgumentError(f"pattern: must name a part of an address, found {names.pattern!r}: {error}") from error


def check_alike(meeting: Meeting, options: dict[str, Any]) -> None:
    """Collective over the ranks: checks that all have the same options.

    Raises:
        ArgumentError: one differs.
    """
    for rank, others in enumerate(meeting.group.all_gather(options)):
        for name, value in options.items():
            if others.get(name) != value:
                raise ArgumentError(
                    f"{name}: must be the same on all ranks, but is {value!r} here and {others.get(name)!r} on rank "
                    f"{rank}"
                )


def check_number(name: str, value: int | None) -> None:
    """Checks a number that may be None.

    Raises:
        ArgumentError: it is below 1, or no integer.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name}: must be None or an integer of at least 1, found {value!r}")


def check_step(step: Any) -> None:
    """Checks a step.

    Raises:
        ArgumentError: it is no integer from 0 to `MOST_STEP`.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST_STEP:
        found = step if type(step) is int else f"of {type(step).__name__}"
        raise ArgumentError(f"step must be an integer from 0 to {MOST_STEP}, but is {found}")


def checked_seconds(seconds: Any) -> float:
    """Returns a number of seconds.

    Raises:
        ArgumentError: it is below 0, or no number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ArgumentError(f"timeout_seconds: must be None or a number of at least 0, found {seconds!r}")
    return seconds


def check_word(name: str, word: str, words: tuple[str, ...]) -> None:
    """Checks that a word is one of several.

    Raises:
        ArgumentError: it is another one.
    """
    if word not in words:
        raise ArgumentError(f"{name}: must be {' or '.join(map(repr, words))}, found {word!r}")
