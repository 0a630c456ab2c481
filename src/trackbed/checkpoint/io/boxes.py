"""Reads parts of stored tensors, and objects, into their places, with several threads."""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Event
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import torch

from trackbed.cancellation import polling
from trackbed.checkpoint.format.catalogue import Catalogue
from trackbed.checkpoint.format.extents import SUM_BYTES
from trackbed.checkpoint.format.safe_pickle import load_torch_item
from trackbed.checkpoint.io.box_parts import Numbers, cut_box, slabs_of
from trackbed.checkpoint.io.file_reader import AnyFolder, open_reader
from trackbed.checkpoint.io.file_writer import bytes_of
from trackbed.checkpoint.io.pinned_blocks import StreamCopies, UploadLane, is_on_gpu, wait_for
from trackbed.checkpoint.io.range_reader import RangeReader
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.daemon_threads import DaemonThreads
from trackbed.errors import CheckpointError

_SHARDED_OBJECT: Final = re.compile(r"/shard_[0-9.]*_[0-9.]*$")
"""End of the unique key of a `ShardedObject`: its place and its grid."""
_HEAD_BYTES: Final = 10
_MOST_HEADER_BYTES: Final = 100_000_000  # of files of safetensors


class BoxReader:
    """Reads from the files of a checkpoint, which it keeps open. A context manager.

    Tensors on a GPU are filled on its current stream, for which no read waits.

    Args:
        folder: folder of the checkpoint.
        catalogue: its contents.
        poll: called while a GPU is waited for; may raise to end the work.
    """

    def __init__(self, folder: AnyFolder, catalogue: Catalogue, poll: Callable[[], None] = lambda: None) -> None:
        self._poll = poll
        self._folder = folder
        self._catalogue = catalogue
        self._readers: dict[int, RangeReader] = {}
        self._expected: deque[str] = deque()
        self._fetched: set[str] = set()
        self._open = ExitStack()
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._lanes: dict[torch.device, UploadLane] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._readers.clear()

    def read_object(self, unique_key: str) -> Any:
        """Reads an object.

        Raises:
            CheckpointError: it is damaged, or has classes that are not allowed.
        """
        if unique_key not in self._fetched:
            self._fetch_objects(unique_key)
        content = self._read_item(self._catalogue.objects[unique_key], unique_key)
        found = load_torch_item(content, f"{self._file_of(self._catalogue.objects[unique_key])}: {unique_key}")
        is_sharded = _SHARDED_OBJECT.search(unique_key) is not None  # others are those of torch's own checkpoints
        return found[0] if is_sharded and isinstance(found, list) and len(found) == 1 else found

    def expect(self, unique_keys: Iterable[str]) -> None:
        """Says which objects are read next, in this order: from an object store many of them are fetched together."""
        self._expected = deque(unique_keys)
        self._fetched = set()

    def read_bytes(self, row: int, what: str) -> bytes:
        """Reads an item as it is stored.

        Raises:
            CheckpointError: it is damaged.
        """
        return bytes(self._read_item(row, what))

    def read_tensor(self, key: str) -> torch.Tensor:
        """Reads a whole tensor into new memory of the host.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        stored = self._catalogue.tensors.get(key)
        if stored is None:
            raise CheckpointError(f"{key}: must be a tensor of the checkpoint, but is not there")
        value = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.read_box(key, value, (0,) * len(stored.shape))
        return value

    def read_box(self, key: str, target: torch.Tensor, offset: Numbers) -> int:
        """Fills a tensor with those elements of a stored tensor that lie at its place.

        Args:
            key: key of the stored tensor.
            target: tensor with as many axes.
            offset: first element of the target in the stored tensor.

        Returns:
            Number of elements that were filled.
        """
        shape = tuple(target.shape)
        if 0 in shape:
            return 0
        count = 0
        for row, first, end in self._catalogue.overlaps(key, offset, shape):
            if first == offset and self._read_whole(key, row, target, first):
                return target.numel()
            place = tuple(slice(low - at, high - at) for low, high, at in zip(first, end, offset, strict=True))
            part = target[place]
            stored, size = self._catalogue.box(row, len(shape))
            low = tuple(at - start for at, start in zip(first, stored, strict=True))
            high = tuple(at - start for at, start in zip(end, stored, strict=True))
            if self._catalogue.payload_start[row] < 0:
                index = tuple(map(slice, low, high))
                part.copy_(self._read_foreign(key, row, size)[index])
            else:
                self._read_part(key, row, part, size, low, high)
            count += part.numel()
        return count

    def hold(self, places: Iterable["BoxToFill"]) -> None:
        """Fetches what is read next, where one request for each box takes long.

        Args:
            places: the boxes that are read next.
        """
        self._hold(ranges_of(places, self._catalogue))

    def _fetch_objects(self, unique_key: str) -> None:
        """Fetches an object, and those that are expected behind it, if it is expected."""
        while self._expected and self._expected[0] != unique_key:
            self._expected.popleft()
        rows: list[int] = []
        num_bytes = 0
        self._fetched = set()
        while self._expected and (not rows or num_bytes < _GROUP_BYTES):
            key = self._expected.popleft()
            rows.append(self._catalogue.objects[key])
            num_bytes += int(self._catalogue.num_bytes[rows[-1]])
            self._fetched.add(key)
        starts = self._catalogue.start[rows].tolist()
        ends = (self._catalogue.start[rows] + self._catalogue.num_bytes[rows]).tolist()
        with suppress(CheckpointError):  # the read of an object itself says what is wrong with it
            self._hold(zip(rows, starts, ends, strict=True))

    def _hold(self, found: Iterable[tuple[int, int, int]]) -> None:
        """Fetches ranges, each with the row whose file has it."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for row, start, stop in found:
            ranges.setdefault(int(self._catalogue.file[row]), []).append((start, stop))
            self._reader(row)
        for number, of_file in ranges.items():
            self._readers[number].hold(join_ranges(of_file, _GAP_BYTES))

    def _read_whole(self, key: str, row: int, target: torch.Tensor, offset: Numbers) -> bool:
        """Fills a tensor that is one stored box, if its bytes are those of the box. Returns True if they are."""
        if not _holds_bytes(target) or not target.is_contiguous():
            return False
        if target.dtype != self._catalogue.tensors[key].dtype or self._catalogue.payload_start[row] < 0:
            return False
        if self._catalogue.box(row, target.ndim) != (offset, tuple(target.shape)):
            return False
        self._read_range(key, row, bytes_of(target), 0)
        return True

    def check_item(self, key: str, row: int) -> None:
        """Reads the box of a row that another program wrote."""
        _, size = self._catalogue.box(row, len(self._catalogue.tensors[key].shape))
        if self._catalogue.payload_start[row] < 0:
            self._read_foreign(key, row, size)
        else:  # of a file of safetensors, where the elements alone are stored
            self._read_item(row, key)

    def _read_part(self, key: str, row: int, part: torch.Tensor, size: Numbers, low: Numbers, high: Numbers) -> None:
        """Fills a tensor with a part of a box."""
        dtype = self._catalogue.tensors[key].dtype
        if not size:
            size, low, high, part = (1,), (0,), (1,), part.view(1)
        is_direct = _holds_bytes(part) and part.dtype == dtype
        for slab in slabs_of(size, low, high, dtype.itemsize):
            axis = len(slab.index)
            inside = tuple(place - at for place, at in zip(slab.index, low, strict=False))
            there = part[inside][slab.low - low[axis] : slab.high - low[axis]]
            is_whole = slab.is_whole(size, low, high)
            if is_direct and is_whole and there.is_contiguous():
                self._read_range(key, row, bytes_of(there), slab.start * dtype.itemsize)
                continue
            lane = self._lane(part.device)
            num_bytes = slab.num_elements * dtype.itemsize
            staged = self._stage(num_bytes) if lane is None else lane.take(num_bytes, self._poll)
            self._read_range(key, row, staged.numpy(), slab.start * dtype.itemsize)
            box = staged.view(dtype).view(slab.high - slab.low, *size[axis + 1 :])
            wanted = (slice(None), *map(slice, low[axis + 1 :], high[axis + 1 :]))
            if lane is None:
                there.copy_(box[wanted])
            else:
                lane.upload(there, box, wanted)

    def _read_range(self, key: str, row: int, target: np.ndarray[Any, np.dtype[np.uint8]], first: int) -> None:
        catalogue = self._catalogue
        num_bytes, place = int(catalogue.payload_bytes[row]), int(catalogue.first_sum[row])
        sums = catalogue.sums[place : place + -(-num_bytes // SUM_BYTES)] if place >= 0 else catalogue.sums[:0]
        self._reader(row).read_payload(target, int(catalogue.payload_start[row]), num_bytes, first, sums, key)

    def _read_item(self, row: int, what: str) -> memoryview:
        catalogue = self._catalogue
        self._reader(row).require(int(catalogue.start[row]), int(catalogue.num_bytes[row]), what)
        content = np.empty(int(catalogue.num_bytes[row]), dtype=np.uint8)
        if catalogue.first_sum[row] >= 0:
            self._read_range(what, row, content, 0)
        else:
            self._reader(row).read_into(content, int(catalogue.start[row]), what)
        return content.data

    def _read_foreign(self, key: str, row: int, size: Numbers) -> torch.Tensor:
        """Reads a whole box that torch wrote."""
        where, content = f"{self._file_of(row)}: {key}", self._read_item(row, key)
        if _is_safetensors(self._reader(row).first_bytes(_HEAD_BYTES)):
            raise CheckpointError(
                f"{where}: must be written by torch.save, but the file is in the format of safetensors: read it with "
                "safetensors.torch.load_file, or save with SerializationFormat.TORCH_SAVE, the default"
            )
        tensor = load_torch_item(content, where)
        described = self._catalogue.tensors[key].dtype, size
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != described:
            what = (
                f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            )
            raise CheckpointError(
                f"{where}: must be a tensor of {described[0]} {described[1]}, but is {what}: the file is damaged"
            )
        return tensor

    def _lane(self, device: torch.device) -> "UploadLane | None":
        """Lane to a GPU; None for the CPU."""
        if not is_on_gpu(device):
            return None
        if device not in self._lanes:
            self._lanes[device] = UploadLane(StreamCopies(device, is_own=False))
        return self._lanes[device]

    def _stage(self, num_bytes: int) -> torch.Tensor:
        if len(self._staging) < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._staging[:num_bytes]

    def _file_of(self, row: int) -> str:
        return self._catalogue.files[int(self._catalogue.file[row])]

    def _reader(self, row: int) -> RangeReader:
        number = int(self._catalogue.file[row])
        if number not in self._readers:
            self._readers[number] = self._open.enter_context(open_reader(self._folder, self._catalogue.files[number]))
        return self._readers[number]


def _is_safetensors(head: bytes) -> bool:
    """True if a file begins with the length of a description in JSON, and the description."""
    return len(head) == _HEAD_BYTES and head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < _MOST_HEADER_BYTES


def _holds_bytes(tensor: torch.Tensor) -> bool:
    """True if the memory of a tensor on the CPU holds its values, and not their conjugates or negatives."""
    return not is_on_gpu(tensor.device) and not tensor.is_conj() and not tensor.is_neg()


_PIECE_BYTES: Final = 32 << 20
_GPU_PIECE_BYTES: Final = 16 << 20
"""Size of a piece of a tensor on a GPU. Each thread has two of them in the host's memory."""
_MIN_BYTES: Final = 16 << 20
"""Bytes of all places below which one thread reads."""
_MAX_THREADS: Final = 4
_STORE_THREADS: Final = 4
_GROUP_BYTES: Final = 16 << 20
"""Bytes that each thread fetches at once from an object store."""
_GAP_BYTES: Final = 64 << 10
"""Bytes between two ranges of an object up to which one request is made for both."""
_POLL_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class BoxToFill:
    """Tensor that is to be filled from a place of a stored tensor, with all axes of that one."""

    key: str
    box: torch.Tensor
    first: tuple[int, ...]


def ranges_of(places: Iterable[BoxToFill], catalogue: Catalogue) -> Iterator[tuple[int, int, int]]:
    """Yields row, first byte and end in its file of all that is read to fill boxes. Pure."""
    for place in places:
        shape = tuple(place.box.shape)
        itemsize = catalogue.tensors[place.key].dtype.itemsize
        for row, first, end in catalogue.overlaps(place.key, place.first, shape) if 0 not in shape else ():
            start, num_bytes = int(catalogue.payload_start[row]), int(catalogue.payload_bytes[row])
            if start < 0:  # of another program: the item is read whole
                yield row, int(catalogue.start[row]), int(catalogue.start[row] + catalogue.num_bytes[row])
                continue
            stored, size = catalogue.box(row, len(shape))
            low = tuple(at - begin for at, begin in zip(first, stored, strict=True))
            high = tuple(at - begin for at, begin in zip(end, stored, strict=True))
            slabs = slabs_of(size or (1,), low or (0,), high or (1,), itemsize)
            has_sums = catalogue.first_sum[row] >= 0
            for slab in slabs:
                begin, stop = slab.start * itemsize, (slab.start + slab.num_elements) * itemsize
                if has_sums:
                    begin, stop = begin // SUM_BYTES * SUM_BYTES, min(-(-stop // SUM_BYTES) * SUM_BYTES, num_bytes)
                yield row, start + begin, start + stop


def join_ranges(ranges: Iterable[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Joins ranges that overlap, or lie close to each other, in rising order. Pure.

    >>> join_ranges([(20, 30), (0, 5), (8, 12)], 4)
    [(0, 12), (20, 30)]
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def fill_boxes(places: Iterable[BoxToFill], folder: AnyFolder, catalogue: Catalogue, poll: Callable[[], None]) -> None:
    """Fills tensors, large ones in pieces, with as many threads as this process has cores, up to four.

    From an object store, pieces that lie behind each other are fetched together.

    Args:
        places: places, none of which overlaps another.
        folder: folder of the checkpoint.
        catalogue: its contents.
        poll: called every 20 ms or so in this thread; may raise to end the work.
    """
    is_stored = isinstance(folder, StoredFolder)
    most = _GROUP_BYTES if is_stored else _PIECE_BYTES
    pieces = [piece for place in places for piece in _pieces(place, most)]
    num_bytes = sum(piece.box.nbytes for piece in pieces)
    groups = deque(_groups(pieces, catalogue) if is_stored else ([piece] for piece in pieces))
    num_threads = _STORE_THREADS if is_stored else min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    if num_bytes < _MIN_BYTES and not is_stored:
        num_threads = 1
    is_over = Event()
    # A thread has streams of its own. What this one has queued for a tensor must be over before it is filled.
    streams = [torch.cuda.current_stream(device) for device in _gpus_of(pieces)]

    def check_going_on() -> None:
        if is_over.is_set():
            raise CheckpointError("the load was ended while a GPU was waited for")

    def check_wanted(_done: int) -> None:
        if is_over.is_set():
            raise CheckpointError("the load was ended while a store was waited for")

    def work() -> None:
        with (
            torch.no_grad(),
            _on_streams(streams),
            polling(check_wanted),
            BoxReader(folder, catalogue, check_going_on) as reader,
        ):
            while not is_over.is_set():
                try:
                    group = groups.popleft()
                except IndexError:
                    return
                if is_stored:
                    reader.hold(group)
                for piece in group:
                    reader.read_box(piece.key, piece.box, piece.first)

    with DaemonThreads("trackbed-read", num_threads=num_threads) as threads:
        pending = {threads.submit(work) for _ in range(min(num_threads, len(groups)))}
        try:
            while pending:
                done, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                poll()
        finally:
            is_over.set()
    # The caller, and other streams of its, may use the tensors as if they had been filled by the host.
    for stream in streams:
        wait_for(stream.record_event().query, poll)


def _groups(pieces: Iterable[BoxToFill], catalogue: Catalogue) -> Iterator[list[BoxToFill]]:
    """Groups pieces that lie behind each other in a file, few MiB each."""

    def place_of(piece: BoxToFill) -> tuple[int, int]:
        row, start, _ = next(ranges_of([piece], catalogue), (-1, 0, 0))
        return int(catalogue.file[row]) if row >= 0 else -1, start

    group: list[BoxToFill] = []
    size = 0
    for piece in sorted(pieces, key=place_of):
        if group and size + piece.box.nbytes > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.box.nbytes
    if group:
        yield group


def _gpus_of(places: Iterable[BoxToFill]) -> set[torch.device]:
    return {place.box.device for place in places if place.box.device.type == "cuda"}


@contextmanager
def _on_streams(streams: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    """Makes these the current streams of their devices, in this thread and the block."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def _pieces(target: BoxToFill, most: int) -> Iterable[BoxToFill]:
    most = min(most, _GPU_PIECE_BYTES) if is_on_gpu(target.box.device) else most
    if target.box.nbytes <= most:
        return [target]
    pieces = cut_box((0,) * target.box.ndim, tuple(target.box.shape), target.box.itemsize, most)
    return [
        BoxToFill(
            target.key,
            target.box[tuple(slice(low, low + size) for low, size in zip(first, shape, strict=True))],
            tuple(low + start for low, start in zip(first, target.first, strict=True)),
        )
        for first, shape in pieces
    ]
