"""Names of the folders of steps, which of them to keep, and which to set aside. Pure, but for `steps_in`."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA
from trackbed.errors import ArgumentError

DEFAULT_PATTERN: Final = "step-{step:07d}"
MOST_STEP: Final = (1 << 63) - 1
_MOST_DIGITS: Final = 200
_EXAMPLES: Final = (0, 7, 10, 255, 1000, 12_345_678, MOST_STEP)
"""Steps whose names are tried."""
_MOST_NAME_BYTES: Final = 180
"""Bytes of a name, to which the names of partial folders add some."""
Keep = Collection[int] | Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept."""

    keep_last: int | None
    """Number of the newest ones; None for all."""
    keep_every: int | None
    """Steps that it divides are kept, too; None for none."""
    keep: Keep
    """Further steps, or a function that is true for them."""

    def __post_init__(self) -> None:
        """Checks `keep`.

        Raises:
            ArgumentError: it is neither a function nor a collection of steps.
        """
        if not callable(self.keep) and (isinstance(self.keep, str | bytes) or not isinstance(self.keep, Collection)):
            raise ArgumentError(f"keep: must be a set of steps, or a function of a step, found {self.keep!r}")

    def steps_to_remove(self, steps: Iterable[int], in_use: Collection[int | None]) -> list[int]:
        """Steps that are not kept; see the function of this name."""
        return steps_to_remove(
            steps, keep_last=self.keep_last, keep_every=self.keep_every, keep=self.keep, in_use=in_use
        )


@dataclass(frozen=True, slots=True)
class StepNames:
    """Names of the folders of steps."""

    pattern: str = DEFAULT_PATTERN

    def __post_init__(self) -> None:
        """Checks the pattern.

        Raises:
            ArgumentError: the names of steps could not be told apart, or are no names of folders.
        """
        if not isinstance(self.pattern, str):
            raise ArgumentError(f"pattern: must be like {DEFAULT_PATTERN!r}, found {self.pattern!r}")
        try:
            names = {step: self.name(step) for step in _EXAMPLES}
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ArgumentError(f"pattern: must be like {DEFAULT_PATTERN!r}, found {self.pattern!r}: {error}") from None
        is_wrong = any(
            not name.isprintable()
            or "/" in name
            or name.startswith(("partial.", "."))
            or len(name.encode()) > _MOST_NAME_BYTES
            or self.step_of(name) != step
            for step, name in names.items()
        )
        if is_wrong:
            raise ArgumentError(
                f"pattern: must name a folder by the decimal digits of its step, as {DEFAULT_PATTERN!r}, found "
                f"{self.pattern!r}"
            )

    def name(self, step: int) -> str:
        """Name of the folder of a step.

        >>> StepNames().name(100)
        'step-0000100'
        """
        return self.pattern.format(step=step)

    def step_of(self, name: str) -> int | None:
        """Step of the folder of a name; None if it is that of no step.

        >>> StepNames().step_of("step-0000100"), StepNames().step_of("partial.step-0000100")
        (100, None)
        """
        for digits in re.findall(r"[0-9]+", name):
            if len(digits) <= _MOST_DIGITS and int(digits) <= MOST_STEP and self.name(int(digits)) == name:
                return int(digits)
        return None


def steps_in(folder: Path, names: StepNames) -> list[int]:
    """Steps of the checkpoints in a folder, in rising order. The folder need not exist.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found = [one.name for one in folder.iterdir()]
    except FileNotFoundError:
        return []
    steps = ((names.step_of(name), name) for name in found)
    return sorted(step for step, name in steps if step is not None and (folder / name / DCP_METADATA).is_file())


def steps_to_remove(
    steps: Iterable[int],
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep: Keep,
    in_use: Collection[int | None] = (),
) -> list[int]:
    """Steps whose checkpoints are not to be kept, in rising order.

    Args:
        steps: steps of the checkpoints that are there.
        keep_last: number of the last ones to keep; None for all.
        keep_every: steps that it divides are kept; None for none.
        keep: further steps, or a function that is true for them.
        in_use: steps that are being loaded.

    >>> steps_to_remove(range(0, 70, 10), keep_last=2, keep_every=20, keep={30})
    [10]
    >>> steps_to_remove([1, 2], keep_last=3, keep_every=None, keep=())
    []
    """
    found = sorted(steps)
    if keep_last is None:
        return []
    kept = keep if callable(keep) else keep.__contains__
    return [
        step
        for step in found[: max(0, len(found) - max(1, keep_last))]
        if not (keep_every and step % keep_every == 0) and step not in in_use and not kept(step)
    ]
