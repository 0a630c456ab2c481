"""Writes the file with the items of one rank, from its first byte to its last.

It goes past the page cache where the file system allows it.

One thread copies and computes checksums, others write. Bytes are copied once, into blocks that are used again: taking
fresh pages, as the page cache does, costs the system more than the copy.
"""

import contextlib
import errno
import mmap
import os
import resource
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32_combine

from trackbed.checkpoint.format.extents import SUM_BYTES
from trackbed.checkpoint.format.torch_record import tensor_record
from trackbed.checkpoint.io.pinned_blocks import StreamCopies, blocks_of, is_on_gpu
from trackbed.daemon_threads import DaemonThreads
from trackbed.files.checksum import crc32
from trackbed.files.writeback import Writeback

ALIGNMENT: Final = 4096
"""Bytes at whose multiples direct writes and reads begin and end."""
_BLOCK_BYTES: Final = 8 << 20
_NUM_BLOCKS: Final = 4
_NUM_THREADS: Final = 2
_NOT_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)

Bytes = npt.NDArray[np.uint8]
_LARGE_BYTES: Final = 64 << 10
"""Payloads from this size on begin at a multiple of `ALIGNMENT` of the file."""


class FileWriter:
    """Writes a new file, and knows its CRC-32. A context manager: leaving it after an error leaves the file empty.

    Args:
        path: path of the file, which must not exist.
        direct: True to write past the page cache, where the file system allows it.
        in_place: True to write large payloads from the memory in which they lie, where it is aligned. Nothing may
            change it before `finish` returns.
        poll: called after each block; may raise to end the work.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(
        self, path: Path, *, direct: bool = True, in_place: bool = False, poll: Callable[[], None] = lambda: None
    ) -> None:
        self.position = 0
        """Number of bytes so far."""
        self.crc = 0
        """CRC-32 of these bytes."""
        self._path = path
        self._in_place = in_place
        self._poll = poll
        self._descriptor, self._is_direct = _create(path, direct=direct)
        self._writeback = None if self._is_direct else Writeback(self._descriptor)
        self._threads = DaemonThreads("trackbed-write", num_threads=_NUM_THREADS if self._is_direct else 1)
        self._pending: deque[tuple[Future[None], mmap.mmap | None]] = deque()
        """Writes in order, each with the block that is free afterwards."""
        self._free: list[mmap.mmap] = []
        self._num_blocks = 0
        self._block: Bytes | None = None
        self._memory: mmap.mmap | None = None
        self._block_start = 0
        self._filled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shut_down()
        try:
            if error is not None:
                # On a full disk, where the ranks may have the file of their store, too, this makes room for the report.
                with contextlib.suppress(OSError):  # the error of the block counts
                    os.ftruncate(self._descriptor, 0)
        finally:
            os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        source = np.frombuffer(data, dtype=np.uint8)
        self.crc = crc32(source, self.crc)
        self._append(source, None)

    def write_payload(self, blocks: Iterable[Bytes]) -> tuple[int, list[int]]:
        """Appends the payload of an item.

        Args:
            blocks: its bytes, in blocks of any size.

        Returns:
            CRC-32 of the payload, and CRC-32 of each MiB of it, the last one shorter.
        """
        start, whole, sums = self.position, 0, []
        crc, num_bytes = 0, 0  # of the MiB that is not full yet
        for block in blocks:
            done = 0
            if num_bytes == 0 and self._is_in_place(block):
                of_pieces = self._write_in_place(block)
                for one in of_pieces:
                    whole = crc32_combine(whole, one, SUM_BYTES)
                sums += of_pieces
                done = SUM_BYTES * len(of_pieces)
            while done < len(block):
                piece = block[done : done + SUM_BYTES - num_bytes]
                crc = self._append(piece, crc)
                done, num_bytes = done + len(piece), num_bytes + len(piece)
                if num_bytes == SUM_BYTES:
                    sums.append(crc)
                    whole = crc32_combine(whole, crc, num_bytes)
                    crc, num_bytes = 0, 0
        if num_bytes:
            sums.append(crc)
            whole = crc32_combine(whole, crc, num_bytes)
        if self.position > start:
            self.crc = crc32_combine(self.crc, whole, self.position - start)
        return whole, sums

    def align(self, place: int = 0) -> None:
        """Appends zeros up to a position that leaves `place` when it is divided by `ALIGNMENT`."""
        missing = (place - self.position) % ALIGNMENT
        if missing:
            self.write(bytes(missing))

    def finish(self) -> None:
        """Writes what is left, and returns once all bytes are on the disk."""
        if self._block is not None:
            if self._is_direct:
                self._filled = -(-self._filled // ALIGNMENT) * ALIGNMENT
            self._submit()
        while self._pending:
            self._await_first()
        if self._is_direct:
            os.ftruncate(self._descriptor, self.position)
        self._call(os.fdatasync, self._descriptor)

    def _append(self, source: Bytes, crc: int | None) -> int:
        """Copies bytes into blocks. Returns the CRC-32 of the copies, continued from `crc` unless that is None."""
        start = 0
        while start < len(source):
            block = self._block if self._block is not None else self._take()
            count = min(len(source) - start, len(block) - self._filled)
            copy = block[self._filled : self._filled + count]
            copy[:] = source[start : start + count]
            if crc is not None:
                crc = crc32(copy, crc)
            start += count
            self._filled += count
            self.position += count
            if self._filled == len(block):
                self._submit()
        return crc or 0

    def _is_in_place(self, block: Bytes) -> bool:
        """True for bytes that are written from where they lie."""
        is_aligned = block.ctypes.data % ALIGNMENT == 0 and self.position % ALIGNMENT == 0
        return self._in_place and len(block) >= SUM_BYTES and (is_aligned or not self._is_direct)

    def _write_in_place(self, block: Bytes) -> list[int]:
        """Has the whole MiB of some bytes written from where they lie. Returns the CRC-32 of each."""
        if self._block is not None:
            self._submit()
        sums = []
        end = len(block) // SUM_BYTES * SUM_BYTES
        for start in range(0, end, _BLOCK_BYTES):
            chunk = block[start : min(start + _BLOCK_BYTES, end)]
            while len(self._pending) >= _NUM_BLOCKS:
                self._await_first()
            write = self._threads.submit(partial(self._write_block, chunk, len(chunk), self.position))
            self._pending.append((write, None))
            sums += [crc32(chunk[first : first + SUM_BYTES]) for first in range(0, len(chunk), SUM_BYTES)]
            self.position += len(chunk)
        return sums

    def _await_first(self) -> None:
        """Waits for the first write that is pending."""
        future, memory = self._pending.popleft()
        future.result()
        if memory is not None:
            self._free.append(memory)
        self._poll()

    def _take(self) -> Bytes:
        """Makes a block current, the first that is free."""
        while not self._free and self._num_blocks == _NUM_BLOCKS:
            self._await_first()
        if self._free:
            memory = self._free.pop()
        else:
            memory, self._num_blocks = mmap.mmap(-1, _BLOCK_BYTES), self._num_blocks + 1
        self._memory, self._block_start, self._filled = memory, self.position, 0
        self._block = np.frombuffer(memory, dtype=np.uint8)
        return self._block

    def _submit(self) -> None:
        """Has the current block written."""
        memory, size, start = self._memory, self._filled, self._block_start
        self._block = self._memory = None
        if memory is not None:
            self._pending.append((self._threads.submit(partial(self._write_block, memory, size, start)), memory))

    def _write_block(self, memory: Any, size: int, start: int) -> None:
        with memoryview(memory) as view:
            done = 0
            while done < size:
                try:
                    done += self._call(os.pwrite, self._descriptor, view[done:size], start + done)
                except OSError as error:
                    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
                    # The system cuts a direct write at the limit, where it may not be aligned any more.
                    if error.errno in (errno.EFBIG, errno.EINVAL) and 0 <= limit < start + size:
                        words = f"{os.strerror(errno.EFBIG)} (the limit of the size of files is {limit:,} bytes)"
                        raise OSError(errno.EFBIG, words, str(self._path)) from error
                    raise
        if self._writeback is not None:
            self._writeback.grown(start + size)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the system, and has errors name the file."""
        try:
            return function(*arguments)
        except OSError as error:
            error.filename = str(self._path)
            raise


def _create(path: Path, *, direct: bool) -> tuple[int, bool]:
    """Creates a file. Returns its descriptor, and True if it is written past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if direct and hasattr(os, "O_DIRECT"):
        try:
            other = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                os.close(descriptor)
                raise
        else:
            os.close(descriptor)
            return other, True
    return descriptor, False


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
    path: Path,
    items: Iterable[torch.Tensor | bytes],
    *,
    direct: bool = True,
    in_place: bool = False,
    poll: Callable[[], None] = lambda: None,
) -> WrittenFile:
    """Writes items to a new file, and returns once it is on the disk.

    Args:
        path: path of the file.
        items: tensors, of the shapes that are to be stored, and bytes of objects.
        direct: True to write past the page cache where the file system allows it.
        in_place: see `FileWriter`.
        poll: called now and then; may raise to end the work.
    """
    with FileWriter(path, direct=direct, in_place=in_place, poll=poll) as file:
        written = [
            _write_tensor(file, item, poll) if isinstance(item, torch.Tensor) else _write_object(file, item)
            for item in items
        ]
        file.finish()
        return WrittenFile(file.position, file.crc, written)


def _write_tensor(file: FileWriter, tensor: torch.Tensor, poll: Callable[[], None]) -> WrittenItem:
    start, num_bytes = file.position, tensor.nbytes
    if num_bytes < _LARGE_BYTES:
        payload = bytes_of(tensor)
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
    tensor = tensor.detach()
    blocks: Iterable[Bytes] = (
        [bytes_of(tensor)]
        if not is_on_gpu(tensor.device)
        else blocks_of(tensor, StreamCopies(tensor.device, is_own=True), poll)
    )
    crc, sums = file.write_payload(blocks)
    file.write(record.tail(crc))
    return WrittenItem(start, file.position - start, payload_start, num_bytes, sums)


def _write_object(file: FileWriter, content: bytes) -> WrittenItem:
    if len(content) >= _LARGE_BYTES:
        file.align()
    start = file.position
    _, sums = file.write_payload([np.frombuffer(content, dtype=np.uint8)])
    return WrittenItem(start, file.position - start, start, file.position - start, sums)


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Bytes of the elements in row-major order: a view where the tensor is contiguous and on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A single element may have any stride.
    flat: npt.NDArray[np.uint8] = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return flat
