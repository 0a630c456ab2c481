"""Packed Parquet of Megatron-Bridge, written from the packs of a dataset in the order "packed".

A row is a pack. `input_ids`, list of int32, has its segments end to end. A segment is a document, or a piece of one,
with the padding behind it, and has one id more than places: inputs are all ids but the last, labels all but the first.
`loss_mask`, list of int8 and as long, belongs to the label of each input, and is 0 at the last id of a segment.
`seq_start_id`, list of int32, has the first id of each segment, and `seq_num_ids` the ids of each without padding. The
rest of a pack is not stored.

Shapes: B packs of a batch, S places of a pack, M entries of a row of borders, n segments of all packs, I stored ids.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.datasets.batches.reader import ReadsBatches
from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError
from trackbed.files.publish import claim, clear_dead_partials, flush_to_disk, new_partial, publish, write_new

SUFFIXES: Final = (".idx.parquet", ".idx.pq")
"""Ends of the names of files that Megatron-Bridge takes for packed ones."""
NUM_IDS: Final = "seq_num_ids"
"""Further column, which Megatron-Bridge does not read, list of int32: ids of each segment without padding."""
_ROWS: Final = 500
"""Rows of a row group, as Megatron-Bridge writes them."""
_GROUP_PLACES: Final = 1 << 25
"""Most places of a row group of several rows: a reader takes a whole one into memory."""
_BATCH_PLACES: Final = 1 << 20
_PLACE_BYTES: Final = 5
"""Bytes of a place: int32 and int8."""
_HIGHEST: Final = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPacks:
    """Rows of packed Parquet."""

    input_ids: npt.NDArray[np.int32]
    """`[I]` ids of all rows."""
    loss_mask: npt.NDArray[np.int8]
    """`[I]` 1 for the input of each trained label."""
    row_ends: npt.NDArray[np.int32]
    """`[B + 1]` first id of each row, and I."""
    seq_start_id: npt.NDArray[np.int32]
    """`[n]` first id of each segment, counted from that of its row."""
    segment_ends: npt.NDArray[np.int32]
    """`[B + 1]` first segment of each row, and n."""
    num_ids: npt.NDArray[np.int32]
    """`[n]` ids of each segment without padding."""
    padded: npt.NDArray[np.int32]
    """`[n]` places of each segment, with padding."""


@dataclass(slots=True, kw_only=True)
class PackedParquetReport:
    """Counts of a file of packed Parquet."""

    sequence_length: int
    """S."""
    num_packs: int = 0
    """Rows."""
    num_segments: int = 0
    """Documents, and pieces of documents, of all packs."""
    num_places: int = 0
    """Places of all segments, with padding."""
    most_segments: int = 0
    """Most segments of a pack."""
    longest_segment: int = 0
    """Most places of a segment."""
    shortest_pack: int = field(default=_HIGHEST)
    """Fewest places of the segments of a pack."""
    num_lost_labels: int = 0
    """Trained labels behind an end token inside a document, which Megatron-Bridge leaves out of the loss."""
    num_moved_ends: int = 0
    """Padded segments whose last place Megatron-Bridge does not find, as it looks for the last id that is no end."""

    def metadata(self) -> list[dict[str, float]]:
        """Returns what Megatron-Bridge reads from its file of metadata."""
        fill = self.num_places / max(self.num_packs, 1) / self.sequence_length
        return [
            {
                "dataset_max_seqlen": self.longest_segment,
                "max_samples_per_bin": self.most_segments,
                "packing_factor": round(self.num_segments / max(self.num_packs, 1), 2),
                "packing_efficiency": round(100 * fill, 2),
                "pack_size": self.sequence_length,
                "min_packed_seqlen": self.shortest_pack,
            }
        ]

    def add(self, rows: StoredPacks) -> None:
        """Counts rows."""
        places = np.diff(rows.row_ends) - np.diff(rows.segment_ends)
        self.num_packs += len(places)
        self.num_segments += len(rows.padded)
        self.num_places += int(places.sum())
        self.most_segments = max(self.most_segments, int(np.diff(rows.segment_ends).max()))
        self.longest_segment = max(self.longest_segment, int(rows.padded.max()))
        self.shortest_pack = min(self.shortest_pack, int(places.min()))

    def compare(self, rows: StoredPacks, eos_id: int, *, has_padding: bool) -> None:
        """Counts what Megatron-Bridge reads otherwise."""
        self.num_lost_labels += int(((rows.input_ids == eos_id) & (rows.loss_mask != 0)).sum())
        if has_padding:
            last = _first_ids(rows) + rows.num_ids - 1
            ends_early = rows.input_ids[last - 1] == eos_id
            ends_late = (rows.num_ids <= rows.padded) & (rows.input_ids[last] != eos_id)
            self.num_moved_ends += int((ends_early | ends_late).sum())


def stored_packs(batch: Mapping[str, torch.Tensor], *, pad: int) -> StoredPacks:
    """Returns the rows of a batch of packs.

    Args:
        batch: rows of packs, as `gather` of a dataset in the order "packed" returns them.
        pad: id with which segments are padded.

    >>> row = {"tokens": [5, 6, 0, 0, 8, 0], "labels": [6, 7, 0, 0, 9, 0], "loss_mask": [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]}
    >>> row |= {"padding_mask": [False, False, True, True, False, True]}
    >>> row |= {"cu_seqlens": [0, 2, 3, 3], "cu_seqlens_padded": [0, 4, 5, 6]}
    >>> found = stored_packs({name: torch.tensor([values]) for name, values in row.items()}, pad=2)
    >>> found.input_ids.tolist(), found.loss_mask.tolist(), found.seq_start_id.tolist(), found.num_ids.tolist()
    ([5, 6, 7, 2, 2, 8, 9], [0, 1, 0, 0, 0, 1, 0], [0, 5], [3, 2])
    """
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    tokens, logical, borders = arrays["tokens"], arrays["cu_seqlens"], arrays["cu_seqlens_padded"]
    is_segment = np.diff(logical) > 0  # the rest of a pack has no place of its own
    places, padded = np.diff(logical)[is_segment], np.diff(borders)[is_segment]
    rows, _ = np.nonzero(is_segment)
    segment_ends = _ends(is_segment.sum(axis=1))
    first_ids = _ends(padded + 1)
    row_ends = first_ids[segment_ends]
    used = np.arange(tokens.shape[1]) < (np.diff(row_ends) - np.diff(segment_ends))[:, None]
    is_place = np.ones(int(first_ids[-1]), dtype=np.bool_)
    is_place[first_ids[1:] - 1] = False
    input_ids, loss_mask = np.full(len(is_place), pad, dtype=np.int64), np.zeros(len(is_place), dtype=np.int8)
    input_ids[is_place] = np.where(arrays["padding_mask"], pad, tokens)[used]
    loss_mask[is_place] = arrays["loss_mask"][used] != 0
    last_labels = borders[:, :-1][is_segment] + places - 1
    input_ids[first_ids[:-1] + places] = arrays["labels"][rows, last_labels]
    return StoredPacks(
        input_ids=_narrow(input_ids),
        loss_mask=loss_mask,
        row_ends=row_ends,
        seq_start_id=first_ids[:-1] - row_ends[rows],
        segment_ends=segment_ends,
        num_ids=places + 1,
        padded=padded,
    )


def write_packed_parquet(
    dataset: ReadsBatches,
    path: Path,
    *,
    eos_id: int | None,
    num_samples: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PackedParquetReport:
    """Writes samples of a dataset as packed Parquet of Megatron-Bridge, and their metadata beside it.

    Each file appears as a whole, the metadata first. Memory does not grow with the number of samples.

    Args:
        dataset: that of a split, in the order "packed".
        path: the file, whose name ends in .idx.parquet or .idx.pq; its folder is created.
        eos_id: id of the end token of the tokenizer that Megatron-Bridge is run with, which is also that of padding;
            None if it is not known.
        num_samples: number of samples to write, from the first one on, in `[1, len(dataset)]`; None for all.
        progress: callback that receives the bytes done so far, as they are before compression, and those in all.

    Returns:
        Counts of what was written.

    Raises:
        ArgumentError: the dataset has another order, an argument is out of range, `path` exists or has another suffix,
            there is padding to write and no `eos_id`, or pyarrow is not installed.
        FormatError: the data are damaged.
        OSError: a file cannot be read or written.
    """
    config = getattr(dataset, "config", None)
    order, multiple = getattr(config, "order", None), getattr(config, "pack_multiple", 1)
    if order != "packed" or config is None:
        raise ArgumentError(f"{path}: packed Parquet needs a dataset in the order 'packed', found {order!r}")
    if not path.name.endswith(SUFFIXES):
        raise ArgumentError(f"{path}: the name of packed Parquet must end in {' or '.join(SUFFIXES)}")
    if eos_id is None and multiple > 1:
        raise ArgumentError(f"{path}: the id of the end token must be given for pack_multiple {multiple}, found None")
    if eos_id is not None and not 0 <= eos_id <= _HIGHEST:
        raise ArgumentError(f"{path}: the id of the end token must be in [0, {_HIGHEST}], found {eos_id}")
    total = len(dataset) if num_samples is None else num_samples
    if not 1 <= total <= len(dataset):
        raise ArgumentError(f"{path}: the number of samples must be in [1, {len(dataset)}], found {num_samples}")
    _check_free(path)
    require("pyarrow", where=path)
    path.parent.mkdir(parents=True, exist_ok=True)
    export = _Export(dataset, PackedParquetReport(sequence_length=config.sequence_length), total, multiple > 1, eos_id)
    export.write(path, progress)
    return export.report


def metadata_path(path: Path) -> Path:
    """Returns the path of the metadata of a file of packed Parquet.

    >>> metadata_path(Path("packs/training_4096.idx.parquet")).name
    'training_4096.metadata.json'
    """
    suffix = next(one for one in SUFFIXES if path.name.endswith(one))
    return path.with_name(f"{path.name.removesuffix(suffix)}.metadata.json")


@dataclass(frozen=True, slots=True)
class _Export:
    """What is written, and its counts so far."""

    dataset: ReadsBatches
    report: PackedParquetReport
    total: int
    has_padding: bool
    eos_id: int | None

    def write(self, path: Path, progress: Callable[[int, int], None] | None) -> None:
        """Writes the file and its metadata to partial ones, and publishes them."""
        about = metadata_path(path)
        for final in (path, about):
            clear_dead_partials(path.parent, final_name=final.name)
        partial, partial_about = new_partial(path), new_partial(about)
        try:
            self._write_rows(partial, progress)
            write_new(partial_about, json.dumps(self.report.metadata()).encode())
            for one in (partial, partial_about):
                flush_to_disk(one)
            _check_free(path)  # before the metadata of the other file are replaced
            publish(partial_about, about)
            if not claim(str(partial), str(path)):
                raise _taken(path)
            flush_to_disk(path.parent)
        finally:
            partial.unlink(missing_ok=True)
            partial_about.unlink(missing_ok=True)

    def _write_rows(self, partial: Path, progress: Callable[[int, int], None] | None) -> None:
        library, parquet = require("pyarrow", where=partial), require("pyarrow.parquet", where=partial)
        schema, pack_bytes = _schema(library), self.report.sequence_length * _PLACE_BYTES
        rows_of_group = min(_ROWS, max(1, _GROUP_PLACES // self.report.sequence_length))
        with parquet.ParquetWriter(str(partial), schema) as writer:
            for start in range(0, self.total, rows_of_group):
                batches = []
                for rows in self._read(start, min(self.total, start + rows_of_group)):
                    self.report.add(rows)
                    if self.eos_id is not None:
                        self.report.compare(rows, self.eos_id, has_padding=self.has_padding)
                    batches.append(_record_batch(library, rows, schema))
                    if progress is not None:
                        progress(self.report.num_packs * pack_bytes, self.total * pack_bytes)
                writer.write_table(library.Table.from_batches(batches, schema), row_group_size=rows_of_group)

    def _read(self, start: int, stop: int) -> Iterator[StoredPacks]:
        """Yields the rows of samples `[start, stop)`, a few at a time."""
        size, batch = max(1, _BATCH_PLACES // self.report.sequence_length), None
        for first in range(start, stop, size):
            last = min(stop, first + size)
            batch = self.dataset.gather(np.arange(first, last), batch if last - first == size else None)
            yield stored_packs(batch, pad=0 if self.eos_id is None else self.eos_id)


def _schema(library: Any) -> Any:
    int32, int8 = library.list_(library.int32()), library.list_(library.int8())
    return library.schema([("input_ids", int32), ("loss_mask", int8), ("seq_start_id", int32), (NUM_IDS, int32)])


def _record_batch(library: Any, rows: StoredPacks, schema: Any) -> Any:
    ids, segments = library.array(rows.row_ends), library.array(rows.segment_ends)
    lists = [(ids, rows.input_ids), (ids, rows.loss_mask), (segments, rows.seq_start_id), (segments, rows.num_ids)]
    columns = [library.ListArray.from_arrays(ends, library.array(values)) for ends, values in lists]
    return library.RecordBatch.from_arrays(columns, schema=schema)


def _first_ids(rows: StoredPacks) -> npt.NDArray[np.int64]:
    """First id of each segment, counted from that of the batch."""
    return np.repeat(rows.row_ends[:-1].astype(np.int64), np.diff(rows.segment_ends)) + rows.seq_start_id


def _ends(sizes: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    """Returns 0, and the sum of sizes up to each one."""
    found = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=found[1:])
    return found


def _narrow(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= _HIGHEST:
        raise ArgumentError(f"ids of tokens must be in [0, {_HIGHEST}], found {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def _check_free(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise _taken(path)


def _taken(path: Path) -> ArgumentError:
    return ArgumentError(f"{path}: the file must not exist yet, found one")
