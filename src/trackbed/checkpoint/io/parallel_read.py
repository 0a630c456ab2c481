"""Threads that read parts of stored tensors into their places."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

import torch

from trackbed.checkpoint.format.catalogue import Catalogue
from trackbed.checkpoint.io.boxes import BoxReader, cut_box

_PIECE_BYTES: Final = 32 << 20
_MIN_BYTES: Final = 16 << 20
"""Bytes of all places below which one thread reads."""
_MAX_THREADS: Final = 4
_POLL_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Place:
    """Tensor that is to be filled from a place of a stored tensor, with all axes of that one."""

    key: str
    box: torch.Tensor
    first: tuple[int, ...]


def read_places(places: Iterable[Place], folder: Path, catalogue: Catalogue, poll: Callable[[], None]) -> None:
    """Fills tensors, large ones in pieces, with as many threads as this process has cores, up to four.

    Args:
        places: places, none of which overlaps another.
        folder: folder of the checkpoint.
        catalogue: its contents.
        poll: called every 20 ms or so in this thread; may raise to end the work.
    """
    pieces = deque(piece for place in places for piece in _pieces(place))
    num_bytes = sum(piece.box.nbytes for piece in pieces)
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0))) if num_bytes >= _MIN_BYTES else 1
    is_over = Event()
    # A thread has streams of its own. What this one has queued for a tensor must be over before it is filled.
    streams = [torch.cuda.current_stream(device) for device in _gpus_of(pieces)]

    def work() -> None:
        with torch.no_grad(), _on_streams(streams), BoxReader(folder, catalogue) as reader:
            while not is_over.is_set():
                try:
                    piece = pieces.popleft()
                except IndexError:
                    return
                reader.read_box(piece.key, piece.box, piece.first)

    with ThreadPoolExecutor(num_threads, "trackbed-read") as threads:
        pending = {threads.submit(work) for _ in range(num_threads)}
        try:
            while pending:
                done, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                poll()
        finally:
            is_over.set()


def _gpus_of(places: Iterable[Place]) -> set[torch.device]:
    return {place.box.device for place in places if place.box.device.type == "cuda"}


@contextmanager
def _on_streams(streams: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    """Makes these the current streams of their devices, in this thread and the block."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def _pieces(place: Place) -> Iterable[Place]:
    if place.box.nbytes <= _PIECE_BYTES:
        return [place]
    pieces = cut_box((0,) * place.box.ndim, tuple(place.box.shape), place.box.itemsize, _PIECE_BYTES)
    return [
        Place(
            place.key,
            place.box[tuple(slice(low, low + size) for low, size in zip(first, shape, strict=True))],
            tuple(low + start for low, start in zip(first, place.first, strict=True)),
        )
        for first, shape in pieces
    ]
