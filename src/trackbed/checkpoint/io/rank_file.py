"""File with the items that one rank writes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.checkpoint.format.torch_record import tensor_record
from trackbed.checkpoint.io.file_writer import ALIGNMENT, FileWriter
from trackbed.files.checksum import crc32

__all__ = ["WrittenFile", "WrittenItem", "bytes_of", "write_items"]

_LARGE_BYTES: Final = 64 << 10
"""Payloads from this size on begin at a multiple of `ALIGNMENT` of the file."""


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """Place and checksums of an item."""

    start: int
    num_bytes: int
    payload_start: int
    payload_bytes: int
    sums: list[int]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file and its items, in order."""

    num_bytes: int
    crc: int
    items: list[WrittenItem]


def write_items(
    path: Path, items: Iterable[torch.Tensor | bytes], *, direct: bool = True, poll: Callable[[], None] = lambda: None
) -> WrittenFile:
    """Writes items to a new file, and returns once it is on the disk.

    Args:
        path: path of the file.
        items: tensors, of the shapes that are to be stored, and bytes of objects.
        direct: True to write past the page cache where the file system allows it.
        poll: called now and then; may raise to end the work.

    Raises:
        OSError: the file cannot be written.
    """
    with FileWriter(path, direct=direct, poll=poll) as file:
        written = [
            _write_tensor(file, item) if isinstance(item, torch.Tensor) else _write_object(file, item) for item in items
        ]
        file.finish()
        return WrittenFile(file.position, file.crc, written)


def _write_tensor(file: FileWriter, tensor: torch.Tensor) -> WrittenItem:
    payload = bytes_of(tensor)
    start = file.position
    if len(payload) < _LARGE_BYTES:
        record = tensor_record(tensor.dtype, tuple(tensor.shape))
        payload_start = start + len(record.head)
        content = b"".join((record.head, payload.data))
        crc = crc32(memoryview(content)[len(record.head) :])
        file.write(content + record.tail(crc))
        return WrittenItem(start, file.position - start, payload_start, len(payload), [crc] if len(payload) else [])
    file.align()
    start = file.position
    record = tensor_record(tensor.dtype, tuple(tensor.shape), payload_start=ALIGNMENT)
    file.write(record.head)
    payload_start = file.position
    crc, sums = file.write_payload(payload)
    file.write(record.tail(crc))
    return WrittenItem(start, file.position - start, payload_start, len(payload), sums)


def _write_object(file: FileWriter, content: bytes) -> WrittenItem:
    if len(content) >= _LARGE_BYTES:
        file.align()
    start = file.position
    _, sums = file.write_payload(np.frombuffer(content, dtype=np.uint8))
    return WrittenItem(start, file.position - start, start, file.position - start, sums)


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Bytes of the elements in row-major order: a view where the tensor is contiguous and on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A single element may have any stride.
    flat: npt.NDArray[np.uint8] = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return flat
