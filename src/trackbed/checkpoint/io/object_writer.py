"""Writes items of a rank to objects of a store, of a size that one request writes.

An object appears whole or not at all, and nothing of it is left if its request fails, unlike an upload in parts, which
only an item takes that is large and cannot be cut. Payloads that lie in the memory of the host are sent from there.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final

import numpy as np
import torch
from isal.isal_zlib import crc32_combine

from trackbed.cancellation import polling
from trackbed.checkpoint.format.extents import SUM_BYTES, FileChecksum
from trackbed.checkpoint.format.torch_record import tensor_record
from trackbed.checkpoint.io.box_parts import cut_box
from trackbed.checkpoint.io.file_writer import WrittenItem, bytes_of
from trackbed.checkpoint.io.range_reader import Bytes
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.daemon_threads import DaemonThreads
from trackbed.files import stores
from trackbed.files.checksum import crc32
from trackbed.files.stores import Address
from trackbed.files.stores.waiting import result_of

OBJECT_BYTES: Final = 64 << 20
"""Bytes of an item from which on it is cut, and of an object from which on another one begins."""
_SMALL_BYTES: Final = 64 << 10
"""Bytes of a payload up to which it is copied, so that an object does not have thousands of buffers."""


class _Object:
    """An object that is being filled."""

    def __init__(self) -> None:
        self.position = 0
        """Number of bytes so far."""
        self.crc = 0
        """CRC-32 of these bytes."""
        self.buffers: list[memoryview] = []
        self.items: list[WrittenItem] = []

    def append(self, item: torch.Tensor | bytes) -> None:
        """Appends a tensor as `torch.save` writes it, or the bytes of an object."""
        start = self.position
        if isinstance(item, bytes):
            _, sums = self._write_payload(np.frombuffer(item, dtype=np.uint8))
            self.items.append(WrittenItem(start, self.position - start, start, len(item), sums))
            return
        payload = bytes_of(item)
        record = tensor_record(item.dtype, tuple(item.shape))
        if len(payload) < _SMALL_BYTES:
            crc = crc32(payload)
            self._write(b"".join((record.head, payload.data, record.tail(crc))))
            sums = [crc] if len(payload) else []
        else:
            self._write(record.head)
            crc, sums = self._write_payload(payload)
            self._write(record.tail(crc))
        payload_start = start + len(record.head)
        self.items.append(WrittenItem(start, self.position - start, payload_start, len(payload), sums))

    def _write(self, content: bytes) -> None:
        self.crc = crc32(content, self.crc)
        self._append(memoryview(content))

    def _write_payload(self, payload: Bytes) -> tuple[int, list[int]]:
        """Appends a payload. Returns its CRC-32, and that of each MiB."""
        sums = [crc32(payload[start : start + SUM_BYTES]) for start in range(0, len(payload), SUM_BYTES)]
        whole = 0
        for number, one in enumerate(sums):
            whole = crc32_combine(whole, one, min(SUM_BYTES, len(payload) - number * SUM_BYTES))
        if len(payload):
            self.crc = crc32_combine(self.crc, whole, len(payload))
            self._append(payload.data)
        return whole, sums

    def _append(self, view: memoryview) -> None:
        self.buffers.append(view)
        self.position += len(view)


def pieces_of(item: torch.Tensor | bytes) -> Iterator[torch.Tensor | bytes]:
    """Yields the parts of an item that are stored by themselves: views of a large tensor."""
    if isinstance(item, bytes) or item.nbytes <= OBJECT_BYTES:
        yield item
        return
    for first, size in cut_box((0,) * item.ndim, tuple(item.shape), item.itemsize, OBJECT_BYTES):
        yield item[tuple(slice(low, low + length) for low, length in zip(first, size, strict=True))]


def write_objects(
    items: Iterable[torch.Tensor | bytes],
    address_of: Callable[[str], Address],
    names: Iterable[str],
    poll: Callable[[], None] = lambda: None,
    *,
    cuts: bool = True,
    in_flight: int = 4,
) -> WrittenFiles:
    """Writes items to as many objects as they need, a few at the same time.

    Args:
        items: tensors of the shapes that are to be stored, none of which may change meanwhile, and bytes of objects.
        address_of: returns the address of an object, by its name.
        names: names of objects that are free, as many as needed.
        poll: called now and then; may raise to end the work.
        cuts: True to cut large tensors, as `pieces_of` does.
        in_flight: objects that are written at the same time.

    Raises:
        StoreError: the store refuses, or does not answer in time.
    """
    free = iter(names)
    files: dict[str, FileChecksum] = {}
    written: list[tuple[str, WrittenItem]] = []
    pending: deque[Future[None]] = deque()

    def put(name: str, content: _Object) -> None:
        with polling(lambda _: poll()):
            stores.put_buffers(address_of(name), content.buffers)

    with DaemonThreads("trackbed-upload", num_threads=in_flight) as threads:
        try:
            for content in _filled(piece for item in items for piece in (pieces_of(item) if cuts else [item])):
                while len(pending) >= in_flight:
                    _wait_for(pending.popleft(), poll)
                name = next(free)
                files[name] = FileChecksum(content.position, content.crc)
                written += [(name, item) for item in content.items]
                pending.append(threads.submit(partial(put, name, content)))
                poll()
            while pending:
                _wait_for(pending.popleft(), poll)
        finally:
            threads.end()
    return WrittenFiles.make(files, written)


def _wait_for(future: Future[None], poll: Callable[[], None]) -> None:
    with polling(lambda _: poll()):
        result_of(future)


def _filled(pieces: Iterable[torch.Tensor | bytes]) -> Iterator[_Object]:
    """Yields objects that are full, and at least one."""
    content, count = _Object(), 0
    for piece in pieces:
        size = len(piece) if isinstance(piece, bytes) else piece.nbytes
        if content.position and content.position + size > OBJECT_BYTES:
            yield content
            content, count = _Object(), count + 1
        content.append(piece)
    if content.position or not count:
        yield content
