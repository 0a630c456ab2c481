"""Saving the work of a run, so that the same command resumes after a kill.

The folder `<output>.unfinished` holds, for each key, the tokens up to the last save (a file that becomes the `.bin`)
and the arrays that describe their documents. The file `record.json`, renamed into place, gives the valid size of each;
bytes beyond it are truncated. No fsync: checksums in the record show whether all data reached the disk.

Shapes: N sequences and D documents of a key.
"""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cache import fingerprint
from trackbed.errors import FormatError
from trackbed.files import Checksum, FileSum, checksum_bytes, clear_dead_partials, new_partial, publish, write_new
from trackbed.preprocess.beside import SOURCE_ARRAYS, TRAINED_ARRAYS
from trackbed.preprocess.config import PreprocessConfig
from trackbed.preprocess.find_inputs import LOCK_NAME, RECORD_NAME, UNFINISHED_SUFFIX, is_saved_name
from trackbed.preprocess.inputs import InputFile
from trackbed.preprocess.report import Tally
from trackbed.preprocess.tokenise_chunk import ChunkTokenizer
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.commit import PairFiles
from trackbed.tokens.document_sources import SourceColumns
from trackbed.tokens.trained_tokens import TrainedColumns
from trackbed.version import __version__

FORMAT: Final = "trackbed-unfinished"
VERSION: Final = 3
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "lengths": np.dtype("<i4"),
    "counts": np.dtype("<i4"),
    "modes": np.dtype("i1"),
    "places": np.dtype("<i8"),
    "files": np.dtype("<u4"),
    "mask_firsts": np.dtype("<u8"),
    "mask_runs": np.dtype("<u4"),
}
"""Dtype of each array: `[N]` tokens in each sequence, `[D]` sequences in each document, `[N]` modes; `[D]` places of
records and numbers of their files in the list of inputs, where sources are kept; of conversations,
`[D]` runs of trained tokens up to each document, and `[2 R]` their first tokens and numbers of tokens."""

logger = logging.getLogger(__name__)


def decisions(config: PreprocessConfig, files: Sequence[InputFile], work: ChunkTokenizer) -> dict[str, Any] | None:
    """Returns everything that decides the output of each chunk; None if tokenizer or splitter have no fingerprint."""
    identity = getattr(work.tokenizer, "fingerprint", None)
    splitter = "" if work.splitter is None else getattr(work.splitter, "fingerprint", None)
    if identity is None or splitter is None:
        return None
    images = work.images
    return {
        "trackbed": __version__,
        "tokenizer": str(identity),
        "splitter": str(splitter),
        "inputs": [
            [file.with_absolute_path().name, file.format.value, file.compression.value, file.size_bytes, file.version]
            for file in files
        ],
        "json_keys": list(config.json_keys),
        **({"drop_record": config.drop_record} if len(config.json_keys) > 1 else {}),
        "dtype": work.dtype.name,
        "eod": work.eod,
        "images": None if images is None else [str(images.root), images.config.key, images.config.pad_length],
        "chunk_bytes": config.chunk_bytes,
        "max_record_bytes": config.max_record_bytes,
        **({"keep_sources": True} if config.keep_sources else {}),
        **({} if work.chat is None else {"chat": work.chat.decisions()}),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """State of a run at its last save."""

    chunks: int
    """Number of chunks done."""
    counts: dict[str, Any]
    """Counts of the tally after those chunks."""
    tokens: tuple[FileSum, ...]
    """Size and checksums of the valid part of each `.bin`."""
    arrays: tuple[dict[str, FileSum], ...]
    """Size and checksums of the valid part of each file of an array, by the name of the array."""
    ended: bool
    """True if these are all chunks."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "SavedRun":
        """Parses `record.json`; may raise any exception if the record is invalid."""
        return cls(
            chunks=fields["chunks"],
            counts=fields["counts"],
            tokens=tuple(FileSum.from_json(one) for one in fields["tokens"]),
            arrays=tuple({name: FileSum.from_json(one) for name, one in of.items()} for of in fields["arrays"]),
            ended=fields["ended"],
        )


class UnfinishedFolder:
    """Folder of saved work: saves the work of a run, or restores the work of an earlier run.

    Args:
        config: options of the run.
        decided: everything that decides the output, see `decisions`; None to save nothing.
        array_names: arrays that describe the documents: `lengths`, `counts` unless a document has one sequence, and
            `modes` if sequences have modes.
    """

    def __init__(
        self, config: PreprocessConfig, decided: dict[str, Any] | None, *, array_names: Sequence[str] = ("lengths",)
    ) -> None:
        self.saved: SavedRun | None = None
        """State of the earlier run, if `reopen_builders` found one; else None."""
        self.has_saved = False
        """True if the folder holds work to resume from."""
        self.kept_bytes = 0
        """Bytes of input whose work the folder holds."""
        self._config = config
        self._folder = Path(f"{config.output}{UNFINISHED_SUFFIX}")
        self._record = self._folder / RECORD_NAME
        self._fingerprint = None if decided is None else fingerprint(decided)
        self._array_names = array_names
        self._sums = self._no_sums()
        self._chunks = 0
        self._unsaved_bytes = 0
        self._lock: int | None = None

    def reopen_builders(self, bin_paths: Sequence[str], dtype: type[np.number[Any]]) -> list[IndexedDatasetBuilder]:
        """Returns builders that resume an earlier run with the same decisions; an empty list if there is none."""
        if self._fingerprint is None or not self._folder.is_dir() or not self._acquire():
            return []
        builders: list[IndexedDatasetBuilder] = []
        try:
            saved = self._read()
            for number, path in enumerate(bin_paths):
                builders.append(self._reopen_one(number, path, dtype, saved))
        # Of several pairs, the first may have been reopened when another one fails. All are given up together: one that
        # goes on would be ahead of the others.
        except (FormatError, OSError, ValueError) as error:
            logger.warning("%s: the saved work cannot be used, starting over: %s", self._folder, error)
            for builder in builders:
                builder.discard()
            self._delete_saved()
            return []
        self.saved, self.has_saved, self._chunks = saved, True, saved.chunks
        self.kept_bytes = saved.counts["done_bytes"]
        return builders

    def after_chunk(self, read_bytes: int, builders: Sequence[IndexedDatasetBuilder], tally: Tally) -> bool:
        """Counts a chunk that builders and tally have processed, and saves once per save interval of bytes read.

        Returns:
            True if it has saved.
        """
        self._chunks += 1
        self._unsaved_bytes += read_bytes
        if self._unsaved_bytes < self._config.save_interval_bytes:
            return False
        self._save(builders, tally, ended=False)
        return not self._unsaved_bytes

    def after_last_chunk(self, builders: Sequence[IndexedDatasetBuilder], tally: Tally) -> None:
        """Saves the state after the last chunk, if anything was saved before."""
        if self.has_saved:
            self._save(builders, tally, ended=True)

    def clear(self) -> None:
        """Deletes the saved work, as it is no longer needed."""
        if self._lock is not None:
            self._delete_saved()
            self.has_saved = False

    def close(self) -> None:
        """Unlocks the folder, and removes it if it holds no saved work."""
        if self._lock is None:
            return
        if not self.has_saved:
            # Removed while it is locked: once it is unlocked, another run may lock it, and would lose its lock with the
            # file.
            (self._folder / LOCK_NAME).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: it holds files of the user
                self._folder.rmdir()
        os.close(self._lock)
        self._lock = None

    def _save(self, builders: Sequence[IndexedDatasetBuilder], tally: Tally, *, ended: bool) -> None:
        if self._fingerprint is None or not self._acquire():
            return
        # The record comes last. Killed before it is renamed, a run leaves the record of an earlier save, which still
        # fits: the files only have more bytes than it says, and these are cut. A record that came first would name
        # bytes that were never written.
        tokens = [builder.keep(self._tokens_path(number)) for number, builder in enumerate(builders)]
        arrays = [self._append_arrays(number, builder) for number, builder in enumerate(builders)]
        saved = SavedRun(
            chunks=self._chunks, counts=tally.to_json(), tokens=tuple(tokens), arrays=tuple(arrays), ended=ended
        )
        record = {"format": FORMAT, "version": VERSION, "fingerprint": self._fingerprint, **asdict(saved)}
        partial = new_partial(self._record)
        write_new(partial, json.dumps(record).encode())
        publish(partial, self._record)
        self.has_saved, self._unsaved_bytes, self.kept_bytes = True, 0, tally.done_bytes

    def _append_arrays(self, number: int, builder: IndexedDatasetBuilder) -> dict[str, FileSum]:
        """Appends the numbers of the documents added since the last save."""
        for name, checksum in self._sums[number].items():
            known = checksum.size_bytes // _DTYPES[name].itemsize
            data = _array_of(builder, name, known).astype(_DTYPES[name], copy=False).tobytes()
            # A save that was killed after it had appended these numbers, and before its record, has left them in the
            # file: they are cut first, or they would stand there twice.
            with self._array_path(number, name).open("r+b" if known else "wb", buffering=0) as file:
                file.truncate(checksum.size_bytes)
                file.seek(checksum.size_bytes)
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            checksum.update(data)
        return {name: FileSum.of(checksum) for name, checksum in self._sums[number].items()}

    def _read(self) -> SavedRun:
        """Reads the record of an earlier run with the same decisions."""
        try:
            record = json.loads(self._record.read_bytes())
            found = (record["format"], record["version"], record["fingerprint"])
            saved = SavedRun.from_json(record)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FormatError(f"{self._record}: must be the record of a run, found {error!r}") from error
        if found != (FORMAT, VERSION, self._fingerprint):
            raise FormatError(
                f"{self._record}: must be of the same inputs, options, tokenizer, splitter and version, found others"
            )
        if saved.counts["bad"] and not self._config.skip_bad:
            raise FormatError(
                f"{self._record}: bad records must not have been skipped, found {saved.counts['bad']} that were"
            )
        return saved

    def _reopen_one(
        self, number: int, bin_path: str, dtype: type[np.number[Any]], saved: SavedRun
    ) -> IndexedDatasetBuilder:
        partial = self._tokens_path(number)
        if saved.ended and not partial.exists():
            # The run was killed after it had moved this file out of the folder, and before all pairs had appeared.
            pending = PairFiles.of(bin_path.removesuffix(".bin")).pending.bin
            # A link and no rename: killed after a rename, this run would leave a pair without its tokens.
            os.link(pending if pending.exists() else bin_path, partial)
        arrays = {name: self._read_array(number, name, saved) for name in self._array_names}
        sources = [arrays.pop(name) for name in SOURCE_ARRAYS if name in arrays]
        trained = [arrays.pop(name) for name in TRAINED_ARRAYS if name in arrays]
        written = saved.tokens[number]
        builder = IndexedDatasetBuilder.reopen(bin_path, dtype, partial=partial, written=written, **arrays)
        if sources:
            places, files = sources
            builder.sources = SourceColumns()
            # The names of the files follow: they are those of the inputs, which are the same.
            builder.sources.places.frombytes(places.tobytes())
            builder.sources.numbers.frombytes(files.tobytes())
        if trained:
            firsts, runs = trained
            builder.trained = TrainedColumns()
            builder.trained.firsts.frombytes(firsts.tobytes())
            builder.trained.runs.frombytes(runs.tobytes())
        return builder

    def _read_array(self, number: int, name: str, saved: SavedRun) -> npt.NDArray[Any]:
        path, wanted = self._array_path(number, name), saved.arrays[number][name]
        raw = memoryview(path.read_bytes())[: wanted.size_bytes]
        self._sums[number][name] = checksum_bytes(raw)
        if FileSum.of(self._sums[number][name]) != wanted:
            raise FormatError(f"{path}: must begin with the {wanted.size_bytes} bytes that were saved")
        return np.frombuffer(raw, dtype=_DTYPES[name])

    def _tokens_path(self, number: int) -> Path:
        return self._folder / f"{number}.bin"

    def _array_path(self, number: int, name: str) -> Path:
        return self._folder / f"{number}.{name}"

    def _no_sums(self) -> list[dict[str, Checksum]]:
        return [{name: Checksum() for name in self._array_names} for _ in self._config.json_keys]

    def _delete_saved(self) -> None:
        """Deletes all files that runs save."""
        # The record first: the other files are meaningless without it.
        self._record.unlink(missing_ok=True)
        clear_dead_partials(self._folder, final_name=self._record.name)
        for path in [path for path in self._folder.iterdir() if is_saved_name(path.name)]:
            path.unlink()
        self._sums = self._no_sums()

    def _acquire(self) -> bool:
        """Locks the folder, creating it if needed. Returns False if a live process holds the lock."""
        if self._lock is not None:
            return True
        # A run locks the folder at its first save, or when it resumes. Until then another run may save there, and end.
        existed = self._folder.is_dir()
        self._folder.mkdir(exist_ok=True)
        path = self._folder / LOCK_NAME
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the open and the lock, the run that had the lock may have removed the file (`close`). The lock is
            # then of a file without a name, and another run could lock a new one: both would write to the folder.
            same = os.path.samestat(os.fstat(lock), os.stat(path))  # noqa: PTH116  False if removed
        except OSError:
            same = False
        if not same:
            os.close(lock)
            logger.warning("%s: locked by another process, so this run saves nothing", self._folder)
            self._fingerprint = None
            return False
        self._lock = lock
        if existed and self._chunks:
            self._delete_saved()  # left by a process that started after this one and has exited
        return True


def _array_of(builder: IndexedDatasetBuilder, name: str, start: int) -> npt.NDArray[Any]:
    """Returns the numbers of an array from `start` on."""
    if builder.sequence_modes is not None and name == "modes":
        return np.array(builder.sequence_modes[start:], dtype=np.int8)
    if builder.sources is not None and name in SOURCE_ARRAYS:
        numbers = builder.sources.places if name == "places" else builder.sources.numbers
        return np.array(numbers[start:], dtype=_DTYPES[name])
    if builder.trained is not None and name in TRAINED_ARRAYS:
        # The first number of `firsts` is that before all documents, which is not saved.
        found = builder.trained.firsts[start + 1 :] if name == "mask_firsts" else builder.trained.runs[start:]
        return np.array(found, dtype=_DTYPES[name])
    if name == "counts":
        return np.diff(np.array(builder.document_indices[start:], dtype=np.int64))
    return np.array(builder.sequence_lengths[start:], dtype=np.int32)
