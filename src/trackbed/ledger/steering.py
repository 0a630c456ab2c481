"""Changes of the blend file while a run goes on: found by rank 0, opened on all ranks, and taken over at one step.

The messages of this module travel with the shares of the steps (`ledger.share`), so they cost no further exchange:

1. Rank 0 looks at the file with each step. Its share has the content of a changed one.
2. Each rank opens what it has received, alone and on a thread. Its shares then have the answer: what is wrong, if
   anything is.
3. The step in which all ranks have answered settles it. `LAG` steps later every rank knows, as none goes on before
   the exchange of the step `LAG` before is over, and all take it over behind the same step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from trackbed.blends.open import Splits
from trackbed.blends.schedule import blended, check_continued, check_same_data, continued, plain_stages, schedule_of
from trackbed.daemon_threads import DaemonThreads
from trackbed.datasets.blend.dataset import BlendedDataset
from trackbed.datasets.config import COMPUTED, Stage
from trackbed.errors import ArgumentError, FormatError, TrackbedError
from trackbed.files.regular import read_regular
from trackbed.index import BlendStage

LAG: Final = 2
"""Steps between the exchange that settles a change and the step behind which it takes effect."""

SETTLE_SECONDS: Final = 1.0
"""Time for which a changed file must stay the same, as an editor may write it in parts."""

_MOST_BYTES: Final = 1 << 20
"""Size of a blend file that the ranks tell each other."""

Open = Callable[[bytes, tuple[Stage, ...] | None], Splits]
"""Opens the content of a blend file, on this rank alone, with the stages of a run or those of the file."""


@dataclass(frozen=True, slots=True)
class Version:
    """A blend file as a run uses it."""

    content: bytes
    splits: Splits
    stages: tuple[Stage, ...] | None = None
    """Stages of the run; None for those of the file."""

    @property
    def dataset(self) -> BlendedDataset:
        """The dataset of training."""
        return blended(self.splits.train)

    def state(self) -> dict[str, Any]:
        """Returns the version as plain values, from which `Steering.restored` opens it again."""
        stages = [[first, list(weights), *ramp] for first, weights, *ramp in self.stages or ()]
        return {"content": self.content.decode(), "stages": stages or None}


def can_be_steered(splits: Splits) -> bool:
    """True for a blend of several datasets in an order without an index, which may change while it is read."""
    dataset = splits.train
    return isinstance(dataset, BlendedDataset) and dataset.config.order in COMPUTED and len(dataset.datasets) > 1


@dataclass(slots=True)
class Steering:
    """The blend of a run on one rank, and the change that is under way.

    `share` and `take` are called on the thread of the record, all others on that of training.

    Args:
        version: the blend as it was opened.
        source: the file, on the rank that looks at it.
        open_content: opens another content.
    """

    version: Version
    source: Path | None
    open_content: Open
    least_samples: int = 1
    """Samples that the loader needs for a step."""
    refused: list[str] = field(default_factory=list)
    """What is wrong with changes, for the record; `pop` it."""
    _thread: DaemonThreads = field(default_factory=lambda: DaemonThreads("trackbed-blend"))
    _stamp: tuple[float, Any] = (0.0, None)
    """When the file was first seen as it is, by the clock of `time.monotonic`, and its size and times."""
    _read: Any = None
    """Size and times of the file when it was last read."""
    _seen: bytes = b""
    """Last content that was announced, on rank 0."""
    _opening: tuple[bytes, Future[Splits]] | None = None
    """What is being opened, from the announcement until it is settled."""
    _settled: tuple[int, Version] | None = None
    """Step behind which a change takes effect, and the change."""

    def __post_init__(self) -> None:
        self._seen = self.version.content

    def share(self, stages: str) -> dict[str, Any]:
        """Returns what this rank tells the others with its share of a step.

        Args:
            stages: digest of the stages in force.
        """
        told: dict[str, Any] = {"stages": stages}
        if self._opening is None and self._settled is None:
            content = self._look()
            if content is not None:
                told["content"] = content
        elif self._opening is not None and self._opening[1].done():
            told["answer"] = [_problem(self._opening[1])]
        return told

    def _look(self) -> str | None:
        """Returns a content that has not been announced, once the file has stayed the same for a while."""
        if self.source is None:
            return None
        try:
            status = self.source.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            now = time.monotonic()
            if stamp != self._stamp[1]:
                self._stamp = (now, stamp)
            if stamp == self._read or now - self._stamp[0] < SETTLE_SECONDS:
                return None
            self._read = stamp
            if status.st_size > _MOST_BYTES:
                self.refused.append(f"{self.source}: must have at most {_MOST_BYTES} bytes, found {status.st_size}")
                return None
            content = read_regular(self.source)  # a pipe would be waited for
        except (OSError, FormatError):  # a file that is gone says nothing
            return None
        if content == self._seen:
            return None
        self._seen = content
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            self.refused.append(f"{self.source}: must be UTF-8, found: {error}")
            return None

    def take(self, step: int, told: Mapping[str, Any]) -> None:
        """Goes on with what the ranks have told each other in a step."""
        if "content" in told:
            content = told["content"].encode()
            self._opening = (content, self._thread.submit(lambda: self.open_content(content, None)))
        elif "problem" in told:
            self._opening = None
            self.refused.append(told["problem"])
        elif "settled" in told and self._opening is not None:
            content, opened = self._opening
            self._opening, self._settled = None, (step + LAG, Version(content, opened.result()))

    def due(self, step: int, position: int) -> Version | None:
        """Returns the version that takes effect behind a step, once.

        Args:
            step: the step that was recorded last.
            position: sample that comes next.
        """
        if self._settled is None or step < self._settled[0]:
            return None
        found, self._settled = self._settled[1], None
        return self.gone_over(found, position)

    def gone_over(self, other: Version, position: int) -> Version | None:
        """Makes another version the one in force from a position on, and returns it; None if it cannot go on there.

        What was drawn before stays; the stages of the other file count from the position on.
        """
        try:
            check_same_data(self.version.dataset, other.dataset)
            stages = continued(schedule_of(self.version.dataset), schedule_of(other.dataset), position)
            return self.changed(other.content, other.splits, stages, position)
        except TrackbedError as error:  # the same on every rank
            self.refused.append(str(error))
            return None

    def changed(self, content: bytes, splits: Splits, stages: Sequence[BlendStage], position: int) -> Version:
        """Makes a version with other stages the one in force, and returns it.

        Raises:
            ArgumentError: samples before the position would be others.
        PlanError: a dataset runs out.
        """
        least = max(position, self.least_samples)
        if len(blended(splits.train)) < least:
            raise ArgumentError(
                f"size must be at least {least} samples of training, found {len(blended(splits.train))}"
            )
        plain = plain_stages(stages)
        dataset = with_stages(blended(splits.train), plain)
        check_continued(self.version.dataset, dataset, position)
        self.version = Version(content, splits.with_train(dataset), plain)
        return self.version

    def restored(self, state: Mapping[str, Any]) -> Version | None:
        """Returns the version of a state, or None if it is in force.

        Raises:
            BlendFileError: its datasets cannot be opened any more.
            ArgumentError: it is no state of a blend.
        """
        try:
            found = (
                (int(first), [float(one) for one in weights], int(ramp))
                for first, weights, ramp in state["stages"] or ()
            )
            stages = tuple(found) or None
            content = state["content"].encode()
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise ArgumentError(
                f"the state of a run must have the blend that state_dict returned, found {str(state)[:80]!r}: {error!r}"
            ) from None
        if self.version.state() == {"content": state["content"], "stages": state["stages"]}:
            return None
        return Version(content, self.open_content(content, stages), stages)

    def begin_again(self, version: Version) -> Version | None:
        """Takes over the version of a checkpoint.

        Returns:
            What the file says now, if that is a change of it; for `gone_over`, once the position is known.
        """
        of_file, self.version = self.version, version
        self._opening = self._settled = self._read = None
        self._seen = of_file.content
        return None if of_file.content == version.content else of_file

    def close(self) -> None:
        """Ends the thread."""
        self._thread.end()


def combined(shares: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Returns what the ranks have told each other, for all of them: a pure function of their shares.

    >>> combined([{"stages": "a", "answer": [None]}, {"stages": "a", "answer": ["no file"]}])
    {'problem': 'rank 1: no file'}
    >>> combined([{"stages": "a", "answer": [None]}, {"stages": "a"}])
    {}
    """
    told = [share for share in shares if share is not None]
    differing = [rank for rank, share in enumerate(told) if share["stages"] != told[0]["stages"]]
    if differing:
        return {"error": f"all ranks must have called Run.set_weights alike, found others on rank {differing[0]}"}
    if told and "content" in told[0]:
        return {"content": told[0]["content"]}
    if not told or any("answer" not in share for share in told):
        return {}
    problems = [(rank, share["answer"][0]) for rank, share in enumerate(told) if share["answer"][0] is not None]
    return {"problem": f"rank {problems[0][0]}: {problems[0][1]}"} if problems else {"settled": True}


def with_stages(dataset: BlendedDataset, stages: tuple[Stage, ...]) -> BlendedDataset:
    """Returns a blend of the same datasets with other stages.

    Raises:
        PlanError: a dataset that is drawn has no samples, or runs out.
    """
    config = replace(dataset.config, blend_stages=list(stages))
    return BlendedDataset(dataset.datasets, dataset.weights, dataset.size, config)


def _problem(opened: "Future[Splits]") -> str | None:
    error = opened.exception()
    return None if error is None else str(error)
