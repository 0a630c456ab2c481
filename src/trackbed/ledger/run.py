"""A training run and its record: `trackbed.open_run`."""

import hashlib
import itertools
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import torch

from trackbed.blends.open import Splits, open_blend, open_file_alone
from trackbed.blends.read import read_blend_content
from trackbed.blends.schedule import schedule_of, with_stage
from trackbed.comm import SOLO, Group
from trackbed.comm.torch_group import check_initialized, current_group
from trackbed.datasets.blend.dataset import SplitDataset
from trackbed.datasets.config import Stage
from trackbed.errors import ArgumentError, RunError, TrackbedError
from trackbed.files.folder_lock import FolderLock
from trackbed.files.publish import new_partial, publish, write_new
from trackbed.index import BlendStage, Split
from trackbed.kernels.integers import check_at_least
from trackbed.ledger.metrics import MetricsFile
from trackbed.ledger.record import BLEND, BLENDS, LINE_KEYS, OPEN, check_event
from trackbed.ledger.recorder import Loss, Observer, Recorder, RunFiles
from trackbed.ledger.share import in_global_batches
from trackbed.ledger.steering import Steering, Version, can_be_steered
from trackbed.ledger.values import checked_numbers, plain_value
from trackbed.loading.loader import BatchLoader
from trackbed.version import __version__

logger = logging.getLogger(__name__)

_WHERE: Final = "trackbed.open_run"
_LOCK_NAME: Final = ".run.lock"
_VERSION: Final = 1
_LARGEST: Final = 1 << 62
_OBSERVED: Final = ("on_step", "on_event", "close")
_numbers: Final["WeakKeyDictionary[Any, Iterator[int]]"] = WeakKeyDictionary()
"""Numbers of the next run of each group, the same on all ranks."""


class Run:
    """A training run: its data, its position, and the record of what was fed in each step.

    `trackbed.open_run` makes it. In a program:

        with trackbed.open_run("runs/first", blend="blend.toml") as run:
            loader = run.loader(batch_size=8)
            for batch in loader:
                losses = ...  # of each sample
                run.record(losses)

    Attributes:
        folder: folder of the run.
        splits: the datasets, as `trackbed.open_blend` returns them.
        step: number of steps that were recorded, those before a resume included.
    """

    def __init__(
        self,
        folder: Path,
        splits: Splits,
        group: Group,
        files: RunFiles | None,
        lock: FolderLock | None,
        steering: Steering | None = None,
    ) -> None:
        self.folder = folder
        self.splits = splits
        self.step = 0
        self._lock = lock
        self._group = group.child("blends") if group.size > 1 else group
        self._steering = steering
        self._scheduled: list[tuple[int, dict[str, float], int]] = []
        """Calls of `set_weights` that have not taken effect: step, weights by name and samples of the ramp."""
        self._told: tuple[Any, str] = (None, "")
        """Stages of the last step, and their digest."""
        self._recorder = Recorder(group, files, steering)
        self._is_alone = group.size == 1
        self._loader: BatchLoader | None = None
        self._of_file: Version | None = None
        """Blend file as it was when the run was opened, if the state that was loaded has another one."""
        self._loaded: Mapping[str, Any] | None = None
        """State of the loader that is made next."""
        self._stalled = 0.0
        """Seconds for which the loader has waited up to the last step."""
        self._has_begun = False
        self._is_closed = False
        self._process = os.getpid()

    @property
    def train(self) -> SplitDataset:
        """Dataset of training."""
        return self.splits.train

    def loader(self, *, batch_size: int, **options: Any) -> BatchLoader:
        """Makes the loader of the training data, whose batches are recorded.

        Args:
            batch_size: samples of a rank and micro-batch, at least 1.
            options: further arguments of `trackbed.BatchLoader`.

        Raises:
            ArgumentError: an argument is out of range, or the run has a loader.
        """
        self._check_open()
        if self._loader is not None:
            raise ArgumentError("a run must have one loader, found a second call of Run.loader")
        loader = BatchLoader(self.train, batch_size=batch_size, **options)
        loader.hash_samples()
        if self._loaded is not None:
            loader.load_state_dict(self._loaded)
            self._loaded = None
        self._loader = loader
        if self._steering is not None:
            self._steering.least_samples = loader.global_batch_size
        self._follow_file()
        self._steer()
        return loader

    def record(
        self,
        loss: Loss,
        *,
        grad_norm: Any = None,
        checkpoint_seconds: float = 0.0,
        communication_seconds: float = 0.0,
        **further: float | str | None,
    ) -> None:
        """Records a step: the batches that the loader has returned since the last one. Call it on every rank.

        The line is written on a thread, which gathers what all ranks have read. It holds this thread for some
        microseconds.

        Args:
            loss: loss of each sample, in the order in which they came, or the mean loss of this rank's samples. Of
                losses by sample the line has the mean for each dataset, too, and its sums do not depend on the ranks.
            grad_norm: norm of the gradients, if it is known.
            checkpoint_seconds: time for which saves have held the step.
            communication_seconds: time for which the step has waited for other ranks.
            further: further values of the line, by name.

        Raises:
            ArgumentError: the number of losses is neither 1 nor that of the samples; or, of a balanced loader, the
                samples since the last step are no whole global batches.
            CollectiveError: the line of a step before could not be written, on some rank.
        """
        self._check_open()
        if self._loader is None:
            raise ArgumentError("a step can be recorded after Run.loader, found no loader")
        given = loss if isinstance(loss, torch.Tensor) else checked_numbers(loss, "loss")
        plain = {name: plain_value(name, value) for name, value in {"grad_norm": grad_norm, **further}.items()}
        batches = self._loader.hashes
        if not batches:
            raise ArgumentError(f"step {self.step + 1} must have read a batch before it is recorded, found none")
        taken = sorted(set(further) & LINE_KEYS)
        if taken:
            raise ArgumentError(f"further values must have names of their own, found {', '.join(taken)}")
        num_samples = sum(len(batch.positions) for batch in batches)
        num_losses = given.numel() if isinstance(given, torch.Tensor) else len(given)
        most = len(self.train)
        if num_samples * self._loader.num_ranks > most:
            raise ArgumentError(
                f"a step must have at most the {most} samples that there are, found {num_samples} a rank"
            )
        if num_losses not in (1, num_samples):
            raise ArgumentError(
                f"loss must be one number, or one for each of {num_samples} samples, found {num_losses}"
            )
        if self._loader.balance is not None:
            batches = in_global_batches(batches, self._loader.global_batch_size, self._loader.num_ranks)
        self._loader.pop_hashes()
        if not self._has_begun:
            self._has_begun = True
            self._recorder.call(partial(_begin, self.step, self._loader.division()))
        self.step += 1
        stalled, self._stalled = self._stalled, self._loader.counters.stall_seconds
        fields = {
            **plain,
            "stall_seconds": round(self._stalled - stalled, 6),
            "checkpoint_seconds": round(checkpoint_seconds, 6),
            "communication_seconds": round(communication_seconds, 6),
        }
        self._recorder.step(self.step, batches, given, self._loader.num_ranks, fields, self._stages())
        self._steer()

    def _stages(self) -> str:
        """Digest of the stages in force, which must be the same on all ranks."""
        known = None if self._steering is None else self._steering.version.stages
        told = (known, tuple(self._scheduled))
        if told != self._told[0]:
            self._told = (told, hashlib.sha256(repr((known, self._scheduled)).encode()).hexdigest()[:16])
        return self._told[1]

    def _steer(self) -> None:
        """Takes over the changes of the blend that take effect behind the last recorded step."""
        steering, loader = self._steering, self._loader
        if steering is None or loader is None:
            return
        position = loader.consumed_samples
        version = steering.due(self.step, position)
        if version is not None:
            self._take_over(version, position)
        while self._scheduled and self._scheduled[0][0] <= self.step + 1:
            _, weights, ramp = self._scheduled.pop(0)
            self._add_stage(position, weights, ramp)
        self._tell_refused(steering, self.step)

    def _tell_refused(self, steering: Steering, step: int) -> None:
        """Records changes that were refused."""
        while steering.refused:
            reason = steering.refused.pop(0)
            if self._group.rank == 0:
                logger.warning("%s: the blend stays as it was, as it cannot be changed so: %s", self.folder, reason)
            self._recorder.call(partial(_add_event, "refused", {"step": step, "reason": reason}))

    def _add_stage(self, position: int, weights: Mapping[str, float], ramp: int) -> None:
        steering = self._steering
        if steering is None:
            return
        version = steering.version
        try:  # of the datasets that there are now
            stage = BlendStage(position, self._weights_of(version.splits, weights), ramp)
            stages = with_stage(schedule_of(version.dataset), stage)
            changed = steering.changed(version.content, version.splits, stages, position)
        except TrackbedError as error:  # the same on every rank
            steering.refused.append(f"set_weights: {error}")
        else:
            self._take_over(changed, position)

    def _take_over(self, version: Version, position: int) -> None:
        self.splits = self.splits.with_train(version.splits.train)
        if self._loader is not None:
            self._loader.change_data(version.dataset)
        self._recorder.call(partial(_add_version, self.folder, version, {"step": self.step, "first_sample": position}))
        self._has_begun = False  # the division of samples may be another

    def set_weights(self, step: int, weights: Mapping[str, float], *, ramp_samples: int = 0) -> None:
        """Changes the weights of the blend from the first sample of a step on, as a stage in its file would.

        To be called on every rank alike, between two steps. The stage holds until the file has another one, or is
        changed. After a resume behind `step` the call does nothing: the stage is in the state of the run.

        Args:
            step: number of the step, above the last recorded one. Steps are numbered from 1 on.
            weights: weights by the names of datasets in the blend file, each at least 0; others get the weight 0.
            ramp_samples: samples within which the shares change, linearly; 0 for at once.

        Raises:
            ArgumentError: an argument is out of range, there is no such dataset, or the blend is not one of several
                datasets in the order "instant".
        """
        self._check_open()
        check_at_least(1, step=step)
        check_at_least(0, ramp_samples=ramp_samples)
        if self._steering is None:
            raise ArgumentError('set_weights needs a blend of several datasets in the order "instant", found another')
        if not isinstance(weights, Mapping):
            raise ArgumentError(f"weights must be numbers by name, found {weights!r}")
        for name, weight in weights.items():
            checked_numbers(weight, f"the weight of {name!r}")
        BlendStage(0, self._weights_of(self._steering.version.splits, weights), ramp_samples)  # checks the values
        if step <= self.step:
            logger.warning("%s: set_weights for step %d comes behind it, and does nothing", self.folder, step)
            return
        self._scheduled = sorted(
            [*self._scheduled, (step, dict(sorted(weights.items())), ramp_samples)], key=lambda one: one[0]
        )
        if step == self.step + 1 and self._loader is not None:
            self._steer()

    def _weights_of(self, splits: Splits, weights: Mapping[str, float]) -> tuple[float, ...]:
        measured = splits.measured
        names = [] if measured is None else [member.entry.name for member in measured.of(Split.train)]
        unknown = sorted(set(weights) - set(names))
        if measured is None or unknown:
            raise ArgumentError(f"weights must be for datasets of the blend, {sorted(set(names))}; found {unknown}")
        return tuple(measured.weights_of(weights))

    def event(self, kind: str, **fields: Any) -> None:
        """Records that something has happened, behind the last step. Only rank 0 writes it.

        Args:
            kind: what it is, such as "evaluation".
            fields: values that can be written as JSON.

        Raises:
            ArgumentError: the kind is one that the run records itself, or a value cannot be written.
        """
        self._check_open()
        check_event(kind, fields)
        self._recorder.call(partial(_add_event, kind, {"step": self.step, **fields}))

    def flush(self) -> None:
        """Waits until the lines of all steps are written and durable. Call it on every rank.

        Raises:
            CollectiveError: one could not be written, on some rank.
        """
        self._check_open()
        self._recorder.flush()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the run, behind the last recorded step, for a checkpoint. Call it on every rank.

        Waits until the lines of these steps are written: so none that a checkpoint covers is lost.
        """
        self._check_open()
        self.flush()
        loader = self._loaded if self._loader is None else self._loader.state_dict()
        blend = None if self._steering is None else self._steering.version.state()
        return {"version": _VERSION, "step": self.step, "loader": loader, "blend": blend}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on behind a position. Later steps in the record are superseded by those that follow.

        Raises:
            ArgumentError: it is no position of a run, or one of other data.
            CollectiveError: among several ranks, one cannot open the blend of the state.
        """
        self._check_open()
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ArgumentError(f"the state of a run must have version {_VERSION}, found {state!r}")
        check_at_least(0, step=state.get("step"))
        loaded: Any = state.get("loader")
        if int(state["step"]) >= _LARGEST or (state["step"] and loaded is None):
            raise ArgumentError(f"the state of a run must have a step and the loader's position, found {state!r}")
        self._restore_blend(state)
        if self._loader is None:
            self._loaded = loaded
        elif loaded is not None:
            self._loader.load_state_dict(loaded)
            self._loader.pop_hashes()
        self.step = int(state["step"])
        self._scheduled = [one for one in self._scheduled if one[0] > self.step]
        self._has_begun = False
        self._follow_file()
        self._steer()

    def _restore_blend(self, state: Mapping[str, Any]) -> None:
        """Opens the blend of a state again, if it is another one than that of the file."""
        blend, steering = state.get("blend"), self._steering
        if blend is None or steering is None:
            return
        self.flush()
        with self._group.guarded(f"opening the blend of step {state['step']}"):
            version = steering.restored(blend)
        if version is None:
            return
        self._of_file = steering.begin_again(version)
        self.splits = version.splits
        if self._loader is not None:
            self._loader.change_data(version.dataset)
        self._recorder.call(partial(_add_version, self.folder, version, {"step": int(state["step"])}))

    def _follow_file(self) -> None:
        """Goes over from the blend of a state to what the file says now, at the position of the state."""
        steering, of_file, loader = self._steering, self._of_file, self._loader
        if steering is None or of_file is None or loader is None:
            return
        self._of_file = None
        position = loader.consumed_samples
        version = steering.gone_over(of_file, position)
        if version is not None:
            self.splits = of_file.splits
            self._take_over(version, position)
        self._tell_refused(steering, self.step)

    def close(self) -> None:
        """Waits for all lines, and ends the run's thread. May be called more than once.

        Raises:
            CollectiveError: a line could not be written, on some rank.
        """
        if self._is_closed:
            return
        if self._process != os.getpid():  # a child that was forked has neither the threads nor the files
            self._is_closed = True
            return
        try:
            self._recorder.call(partial(_add_event, "close", {"step": self.step}))
            self.flush()
        except BaseException:
            self._end(waits=False)
            raise
        self._end(waits=True)

    def _end(self, *, waits: bool) -> None:
        """Ends everything, without waiting for other ranks; with `waits`, for the own files and observers."""
        self._is_closed = True
        if self._loader is not None:
            self._loader.close()
        self._recorder.close(waits=waits)
        if self._steering is not None:
            self._steering.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the run. After an error it does not wait for other ranks, which may wait for this one elsewhere."""
        if error is None or self._process != os.getpid() or (self._is_alone and isinstance(error, Exception)):
            self.close()
        elif not self._is_closed:
            self._end(waits=False)

    def _check_open(self) -> None:
        self._check_own()
        if self._is_closed:
            raise ArgumentError(f"{self.folder}: the run must be open, found it is closed")

    def _check_own(self) -> None:
        if self._process != os.getpid():
            raise ArgumentError(f"{self.folder}: a run must be used by the process that opened it, found a child of it")

    def __repr__(self) -> str:
        """Says where the run is."""
        return f"<Run: {self.folder}, {self.step:,} steps, {self.splits!r}>"


def open_run(
    folder: str | os.PathLike[str],
    *,
    blend: str | os.PathLike[str],
    observers: Sequence[Observer] = (),
    **options: Any,
) -> Run:
    """Opens a training run: its data, and its record in a folder, which is made if there is none.

    Collective over the ranks of `torch.distributed`, if it is initialised. A run that goes on opens the same folder,
    and gives `Run.load_state_dict` what `Run.state_dict` has returned for the checkpoint.

    Args:
        folder: folder of the record (docs/formats/run.md), such as the one of the checkpoints or the one above.
        blend: blend file (docs/formats/blend-file.md). The folder keeps a copy of each version of it.
        observers: are told of steps and events, on rank 0; such as `trackbed.ledger.TensorBoardObserver`.
        options: further arguments of `trackbed.open_blend`.

    Raises:
        RunError: another job keeps its record in the folder.
        FormatError: the folder has a file of another program in the place of one of the record.
        BlendFileError: settings are invalid, or data are missing or damaged; lists all problems.
        OSError: the folder cannot be written, or the blend file not read.
        CollectiveError: among several ranks, one of them failed.
    """
    check_initialized(_WHERE)
    if not isinstance(observers, Sequence) or isinstance(observers, str):
        raise ArgumentError(f"observers must be a list, found {observers!r}")
    wrong = [one for one in observers if not all(callable(getattr(one, name, None)) for name in _OBSERVED)]
    if wrong:
        raise ArgumentError(f"observers must have {', '.join(_OBSERVED)}, found {wrong[0]!r}")
    group: Group = current_group() or SOLO
    splits = open_blend(blend, **options)
    content = Path(blend).read_bytes()
    place = Path(folder).absolute()
    files: RunFiles | None = None
    lock: FolderLock | None = None
    try:
        with group.guarded(f"opening the run in {place}"):
            group.agree("the folder of the run", str(place))
            if group.rank == 0:
                place.mkdir(parents=True, exist_ok=True)
                lock = FolderLock(place, _LOCK_NAME, partial(_refusal, place))
                files = RunFiles(place, [MetricsFile(place), *observers])
                version = _keep_blend(place / BLENDS, content)
                files.add_event(
                    OPEN,
                    {
                        "host": socket.gethostname(),
                        "process": os.getpid(),
                        "num_ranks": group.size,
                        "trackbed": __version__,
                        "blend": f"{BLENDS}/{version.name}",
                        "blend_source": os.fspath(Path(blend).absolute()),
                        "datasets": _prefixes(splits),
                    },
                )
        number = 0 if group is SOLO else next(_numbers.setdefault(group, itertools.count()))
        own = group.child(f"run {number}")
        own.barrier()  # a rank that first connects after the end of rank 0, which has the store, would wait in vain
    except BaseException:
        if files is not None:
            files.close()
        if lock is not None:
            lock.release()
        raise
    steering: Steering | None = None
    if can_be_steered(splits):
        named: dict[str, Any] = {name: options[name] for name in ("tokenizer", "cache") if name in options}
        opens = partial(_open_content, Path(blend), named)
        steering = Steering(Version(content, splits), Path(blend) if own.rank == 0 else None, opens)
    return Run(place, splits, own, files, lock, steering)


def _open_content(path: Path, options: Mapping[str, Any], content: bytes, stages: tuple[Stage, ...] | None) -> Splits:
    """Opens the content of a blend file on this rank alone, with the stages of a run or those of the file."""
    file = read_blend_content(content, path=path, folder=path.parent)
    return open_file_alone(replace(file, schedule=stages), **options)


def _prefixes(splits: Splits) -> list[str]:
    """Returns the prefixes of the datasets of training, by number."""
    return [str(one.dataset_path) for one in getattr(splits.train, "datasets", [splits.train])]


def _keep_blend(folder: Path, content: bytes) -> Path:
    """Keeps a copy of a blend file, unless there is one. Returns the copy."""
    folder.mkdir(exist_ok=True)
    versions = sorted((int(path.stem), path) for path in folder.glob("*.toml") if path.stem.isdecimal())
    for _, kept in reversed(versions):
        if kept.read_bytes() == content:
            return kept
    path = folder / f"{versions[-1][0] + 1 if versions else 1}.toml"
    partial_path = new_partial(path)
    try:
        write_new(partial_path, content)
        publish(partial_path, path)
    finally:
        partial_path.unlink(missing_ok=True)
    return path


def _refusal(folder: Path, holder: str | None) -> RunError:
    return RunError(f"{folder}: must be the run of one job, but {holder or 'this process'} has it open")


def _begin(after_step: int, division: Mapping[str, Any], files: RunFiles) -> None:
    files.begin(after_step, division)


def _add_version(folder: Path, version: Version, fields: Mapping[str, Any], files: RunFiles) -> None:
    kept = _keep_blend(folder / BLENDS, version.content)
    stages = {"stages": version.state()["stages"], "datasets": _prefixes(version.splits)}
    _add_event(BLEND, {**fields, "blend": f"{BLENDS}/{kept.name}", **stages}, files)


def _add_event(kind: str, fields: Mapping[str, Any], files: RunFiles) -> None:
    files.steps.flush()
    files.add_event(kind, fields)
