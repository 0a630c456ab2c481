"""What a run keeps of its work while it lasts, so that the same command goes on after a kill.

The folder `<output>.unfinished` holds, for each key, the tokens of all shards that are done (which become the `.bin`)
and the lengths of their documents, and one record, renamed into place, that says how far both have come. Bytes behind
that are cut off. Nothing is flushed to the disk for it: sums in the record tell whether all of it got there.

Shapes: D documents of a key.
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

from trackbed import __version__
from trackbed.cache.fingerprint import fingerprint
from trackbed.errors import FormatError
from trackbed.files import Checksum, FileSum, checksum_bytes, clear_dead_partials, new_partial, publish, write_new
from trackbed.preprocess.config import PreprocessConfig
from trackbed.preprocess.inputs import InputFile
from trackbed.preprocess.plan import Chunk
from trackbed.preprocess.report import Tally
from trackbed.preprocess.tokenise import ChunkTokenizer
from trackbed.preprocess.work_files import LOCK_NAME, RECORD_NAME, UNFINISHED_SUFFIX, is_kept_name
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.commit import PairFiles

__all__ = ["Begun", "Keeper", "decisions"]

FORMAT: Final = "trackbed-unfinished"
VERSION: Final = 1
_LENGTH: Final = np.dtype("<i4")

logger = logging.getLogger(__name__)


def decisions(config: PreprocessConfig, files: Sequence[InputFile], work: ChunkTokenizer) -> dict[str, Any] | None:
    """Everything that decides what has been done after so many chunks; None if the tokenizer has no fingerprint."""
    identity = getattr(work.tokenizer, "fingerprint", None)
    if identity is None:
        return None
    stats = [(file, file.path.stat()) for file in files]
    return {
        "trackbed": __version__,
        "tokenizer": str(identity),
        "inputs": [
            [str(file.path.absolute()), file.layout.value, file.packing.value, stat.st_size, stat.st_mtime_ns]
            for file, stat in stats
        ],
        "json_keys": list(config.json_keys),
        "dtype": work.dtype.name,
        "eod": work.eod,
        "chunk_bytes": config.chunk_bytes,
        "max_record_bytes": config.max_record_bytes,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """How far the work has come."""

    chunks: int
    """Chunks that are done with."""
    counts: dict[str, Any]
    """Those of the tally then."""
    tokens: tuple[FileSum, ...]
    """What each `.bin` begins with."""
    lengths: tuple[FileSum, ...]
    """What each file of lengths begins with."""
    ended: bool
    """Whether there are no more chunks."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Begun":
        """What a record says; it may raise anything where it is none."""
        tokens, lengths = (tuple(FileSum.from_json(one) for one in fields[name]) for name in ("tokens", "lengths"))
        return cls(
            chunks=fields["chunks"], counts=fields["counts"], tokens=tokens, lengths=lengths, ended=fields["ended"]
        )


class Keeper:
    """Keeps the work of one run, or finds what another has kept.

    Args:
        config: what is asked for.
        decided: everything that decides the work; None if nothing is to be kept.
    """

    def __init__(self, config: PreprocessConfig, decided: dict[str, Any] | None) -> None:
        self.begun: Begun | None = None
        """What was found, where `reopen` has found any."""
        self.has_kept = False
        """Whether there is something to go on from."""
        self._config = config
        self._folder = Path(f"{config.output}{UNFINISHED_SUFFIX}")
        self._record = self._folder / RECORD_NAME
        self._decided = None if decided is None else fingerprint(decided)
        self._sums = [Checksum() for _ in config.json_keys]  # of the files of lengths
        self._chunks = 0
        self._waiting_bytes = 0
        self._lock: int | None = None

    def reopen(self, bin_paths: Sequence[str], dtype: type[np.number[Any]]) -> list[IndexedDatasetBuilder]:
        """Builders that go on where a killed run of the same work was; none if there was none."""
        if self._decided is None or not self._folder.is_dir() or not self._claim():
            return []
        builders: list[IndexedDatasetBuilder] = []
        try:
            begun = self._read()
            for number, path in enumerate(bin_paths):
                builders.append(self._reopen_one(number, path, dtype, begun))
        except (FormatError, OSError, ValueError) as error:
            logger.warning("%s: what was kept there cannot be used, the work begins anew: %s", self._folder, error)
            for builder in builders:
                builder.discard()
            self._empty()
            return []
        self.begun, self.has_kept, self._chunks = begun, True, begun.chunks
        return builders

    def passed(self, chunk: Chunk, builders: Sequence[IndexedDatasetBuilder], tally: Tally) -> None:
        """Take note of the next chunk, which builders and tally have had, and keep it if a shard is full."""
        self._chunks += 1
        self._waiting_bytes += chunk.size_bytes
        if self._waiting_bytes >= self._config.shard_bytes:
            self._keep(builders, tally, ended=False)

    def ended(self, builders: Sequence[IndexedDatasetBuilder], tally: Tally) -> None:
        """Take note that there are no more chunks."""
        if self.has_kept:
            self._keep(builders, tally, ended=True)

    def clear(self) -> None:
        """Remove what was kept, as the work is done."""
        if self._lock is not None:
            self._empty()
            self.has_kept = False

    def close(self) -> None:
        """Let others have the folder; it goes if nothing is kept in it."""
        if self._lock is None:
            return
        if not self.has_kept:
            (self._folder / LOCK_NAME).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody's own files are in it
                self._folder.rmdir()
        os.close(self._lock)
        self._lock = None

    def _keep(self, builders: Sequence[IndexedDatasetBuilder], tally: Tally, *, ended: bool) -> None:
        if self._decided is None or not self._claim():
            return
        tokens = [builder.keep(self._tokens_path(number)) for number, builder in enumerate(builders)]
        lengths = [self._keep_lengths(number, builder) for number, builder in enumerate(builders)]
        begun = Begun(
            chunks=self._chunks, counts=tally.to_json(), tokens=tuple(tokens), lengths=tuple(lengths), ended=ended
        )
        record = {"format": FORMAT, "version": VERSION, "fingerprint": self._decided, **asdict(begun)}
        partial = new_partial(self._record)
        write_new(partial, json.dumps(record).encode())
        publish(partial, self._record)
        self.has_kept, self._waiting_bytes = True, 0

    def _keep_lengths(self, number: int, builder: IndexedDatasetBuilder) -> FileSum:
        """Append the lengths of the documents that came since the last time."""
        checksum = self._sums[number]
        known = checksum.size_bytes // _LENGTH.itemsize
        data = np.array(builder.sequence_lengths[known:], dtype=_LENGTH).tobytes()
        with self._lengths_path(number).open("r+b" if known else "wb", buffering=0) as file:
            file.truncate(checksum.size_bytes)
            file.seek(checksum.size_bytes)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        checksum.update(data)
        return FileSum.of(checksum)

    def _read(self) -> Begun:
        """The record of the same work.

        Raises:
            FormatError: there is none, or one of other work.
        """
        try:
            record = json.loads(self._record.read_bytes())
            found = (record["format"], record["version"], record["fingerprint"])
            begun = Begun.from_json(record)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            msg = f"{self._record}: must be the record of a run: {error!r}"
            raise FormatError(msg) from error
        if found != (FORMAT, VERSION, self._decided):
            msg = f"{self._record}: must be of the same inputs, options, tokenizer and version, found others"
            raise FormatError(msg)
        if begun.counts["bad"] and not self._config.skip_bad:
            msg = f"{self._record}: bad records must not be skipped, found {begun.counts['bad']} that were"
            raise FormatError(msg)
        return begun

    def _reopen_one(
        self, number: int, bin_path: str, dtype: type[np.number[Any]], begun: Begun
    ) -> IndexedDatasetBuilder:
        partial, wanted = self._tokens_path(number), begun.lengths[number]
        if begun.ended and not partial.exists():
            # Killed after this one had left the folder, on its way to its final name, and before all were there.
            pending = PairFiles.of(bin_path.removesuffix(".bin")).pending.bin
            os.link(pending if pending.exists() else bin_path, partial)
        raw = memoryview(self._lengths_path(number).read_bytes())[: wanted.size_bytes]
        self._sums[number] = checksum_bytes(raw)
        if FileSum.of(self._sums[number]) != wanted:
            msg = f"{self._lengths_path(number)}: must begin with the {wanted.size_bytes} bytes that were kept"
            raise FormatError(msg)
        lengths = np.frombuffer(raw, dtype=_LENGTH)
        written = begun.tokens[number]
        return IndexedDatasetBuilder.reopen(bin_path, dtype, partial=partial, written=written, lengths=lengths)

    def _tokens_path(self, number: int) -> Path:
        return self._folder / f"{number}.bin"

    def _lengths_path(self, number: int) -> Path:
        return self._folder / f"{number}.lengths"

    def _empty(self) -> None:
        """Remove all that runs keep."""
        # The record first: without it, the rest means nothing.
        self._record.unlink(missing_ok=True)
        clear_dead_partials(self._folder, final_name=self._record.name)
        for path in [path for path in self._folder.iterdir() if is_kept_name(path.name)]:
            path.unlink()
        self._sums = [Checksum() for _ in self._sums]

    def _claim(self) -> bool:
        """Take the folder, made where there is none, unless a living process has it."""
        if self._lock is not None:
            return True
        existed = self._folder.is_dir()
        self._folder.mkdir(exist_ok=True)
        path = self._folder / LOCK_NAME
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(lock), os.stat(path))  # noqa: PTH116  not if its last owner has just left
        except OSError:
            same = False
        if not same:
            os.close(lock)
            logger.warning("%s: another process has it, nothing is kept of this run", self._folder)
            self._decided = None
            return False
        self._lock = lock
        if existed and self._chunks:
            self._empty()  # somebody else's, who came after our start and is gone
        return True
