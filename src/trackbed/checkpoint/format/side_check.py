"""Checks of what a side file says: its checksum shows that it is whole, not that it was written in good faith."""

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import numpy as np

from trackbed.checkpoint.format.catalogue import DTYPE_OF, Catalogue
from trackbed.checkpoint.io.file_writer import SUM_BYTES

__all__ = ["check_description", "check_rows"]

_END: Final = 1 << 62
"""Sizes and places are below this, so that sums of two of them are numbers of 64 bits."""


def check_description(head: Mapping[str, Any]) -> None:
    """Checks the types of what a side file describes, and that its files lie in its folder.

    Raises:
        ValueError: one is another.
    """
    if not isinstance(head["save_id"], str):
        _fail("save_id must be text", head["save_id"])
    for name in (*(_three(entry)[0] for entry in head["files"]), *head["data_files"]):
        is_inside = isinstance(name, str) and name and "\0" not in name and not name.startswith("/")
        if not is_inside or ".." in name.split("/"):
            _fail("files must be names in the folder of the checkpoint", name)
    for _, num_bytes, crc in head["files"]:
        _check_counts((num_bytes, crc))
    keys = [entry[0] for entry in head["tensors"]] + head["objects"]
    if not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        _fail(
            "keys must be text, each there once", next((key for key in keys if not isinstance(key, str)), "one twice")
        )
    for _, dtype, shape, num_rows in head["tensors"]:
        if dtype not in DTYPE_OF:
            _fail("types must be names of types that can be loaded", dtype)
        _check_counts((*shape, num_rows))
    _check_counts((head["rows"], head["axes"], head["sums"]))


def _three(entry: Any) -> Any:
    if not isinstance(entry, list) or len(entry) != 3:
        _fail("each file must have name, size and checksum", entry)
    return entry


def _check_counts(values: tuple[Any, ...]) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < _END:
            _fail("sizes must be whole numbers from 0", value)


def check_rows(catalogue: Catalogue) -> None:
    """Checks the places of the items: those of checksums, and boxes that lie in their tensors.

    Raises:
        ValueError: one is elsewhere.
    """
    counts = (catalogue.start, catalogue.num_bytes, catalogue.payload_bytes, catalogue.offsets, catalogue.sizes)
    if any(len(column) and (column.min() < 0 or column.max() >= _END) for column in counts if column.size):
        _fail("places and sizes must be whole numbers from 0", "another")
    file, first = catalogue.file, catalogue.first_sum
    if len(file) and not 0 <= file.min() <= file.max() < len(catalogue.files):
        _fail(f"numbers of files must be below {len(catalogue.files)}", int(file.max()))
    num_sums = np.where(first < 0, 0, -(-catalogue.payload_bytes // SUM_BYTES))
    if len(first) and (
        min(first.min(), catalogue.payload_start.min()) < -1 or (first + num_sums).max() > len(catalogue.sums)
    ):
        _fail(f"checksums must be among {len(catalogue.sums):,}", "one beyond")
    _check_boxes(catalogue)


def _check_boxes(catalogue: Catalogue) -> None:
    stored = [tensor for tensor in catalogue.tensors.values() if len(tensor.rows)]
    num_axes = catalogue.offsets.shape[1]
    if any(len(tensor.shape) > num_axes for tensor in stored):
        _fail(f"tensors must have at most {num_axes} axes", "one of more")
    counts = [len(tensor.rows) for tensor in stored]
    shapes = np.array([(*tensor.shape, *[1] * (num_axes - len(tensor.shape))) for tensor in stored], dtype=np.int64)
    ends = np.repeat(shapes.reshape(len(stored), num_axes), counts, axis=0)
    rows = slice(0, sum(counts))
    if (catalogue.offsets[rows] + catalogue.sizes[rows] > ends).any():
        _fail("each box must lie within its tensor", "one beyond")
    item_bytes = np.repeat([tensor.dtype.itemsize for tensor in stored], counts)
    wanted = catalogue.sizes[rows].prod(axis=1, dtype=np.float64) * item_bytes
    if ((catalogue.payload_bytes[rows] != wanted) & (catalogue.payload_start[rows] >= 0)).any():
        _fail("each payload must have the bytes of its box", "another size")


def _fail(what: str, found: object) -> NoReturn:
    msg = f"{what}, found {str(found)[:80]!r}"
    raise ValueError(msg)
