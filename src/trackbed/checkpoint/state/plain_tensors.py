"""Comparison of the large plain tensors of all ranks. A checkpoint has rank 0's."""

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, Final

import numpy as np
import orjson
import torch

from trackbed.checkpoint.ranks import Meeting
from trackbed.checkpoint.state.partial_tensors import tensors_in
from trackbed.comm.tensor_digest import components, tensor_digest
from trackbed.daemon_threads import DaemonThreads
from trackbed.errors import CheckpointError

_LARGE_BYTES: Final = 64 << 10
"""Bytes from which a tensor is compared. Smaller ones, such as random states, may differ between ranks."""


@dataclass(frozen=True, slots=True)
class PlainTensors:
    """Plain tensors of a rank: type, shape and digest by path; the digest of a small tensor is None."""

    found: Mapping[str, tuple[str, int | None]]

    def encode(self) -> bytes:
        """Serializes the description, independent of the order of the tensors."""
        return orjson.dumps(sorted((path, kind, digest) for path, (kind, digest) in self.found.items()))

    def digest(self) -> bytes:
        """Hash of 16 bytes of the description."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()

    @classmethod
    def decode(cls, content: bytes) -> "PlainTensors":
        """Parses the result of `encode`."""
        return cls({path: (kind, digest) for path, kind, digest in orjson.loads(content)})


@contextmanager
def digesting(common: dict[str, Any], poll: Callable[[], None]) -> Iterator[Callable[[], PlainTensors]]:
    """Computes the digests of large plain tensors on a thread, while the block runs.

    Args:
        common: plain values of this rank, which must not change meanwhile.
        poll: raises if another rank has failed; called on the thread.

    Yields:
        Function that waits for the result.
    """
    is_given_up = Event()

    def check() -> None:
        if is_given_up.is_set():
            raise CheckpointError("the save has failed")
        poll()

    tensors = [(path, value) for path, value in tensors_in(common) if not _is_without_values(value)]
    if not any(_is_large(value) for _, value in tensors):
        yield lambda: _described(tensors, check)
        return
    # Work of the caller's streams that is still queued may write these tensors: the thread reads on the same streams.
    streams = _current_streams(value for _, value in tensors)

    def described() -> PlainTensors:
        for stream in streams:
            torch.cuda.set_stream(stream)
        return _described(tensors, check)

    with DaemonThreads("trackbed plain tensors") as thread:
        future = thread.submit(described)
        try:
            yield future.result
        finally:
            is_given_up.set()  # without effect where the result was waited for


def _current_streams(tensors: Iterator[Any]) -> list[Any]:
    devices = {one.device for one in tensors if isinstance(one, torch.Tensor) and one.device.type == "cuda"}
    return [torch.cuda.current_stream(device) for device in devices]


def _described(tensors: list[tuple[str, Any]], poll: Callable[[], None]) -> PlainTensors:
    return PlainTensors(
        {path: (_kind(value), _digest(value, poll) if _is_large(value) else None) for path, value in tensors}
    )


def _is_without_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _is_large(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes >= _LARGE_BYTES
    return sum(one.numel() * one.element_size() for one in components(value)) >= _LARGE_BYTES


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"{str(value.dtype).removeprefix('torch.')} nested"
    layout = f" {value.layout}" if isinstance(value, torch.Tensor) and value.layout is not torch.strided else ""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{layout}"


def _digest(value: Any, poll: Callable[[], None]) -> int:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.frombuffer(np.ascontiguousarray(value).tobytes(), dtype=np.uint8).copy())
    return tensor_digest(value, poll)


def check_plain_tensors_agree(
    meeting: Meeting, own_tensors: PlainTensors, digests: list[bytes], of_first_ranks: Container[str] = ()
) -> None:
    """Collective over the ranks: checks that the large plain tensors of all ranks are those that are saved.

    Args:
        meeting: the ranks.
        own_tensors: plain tensors of this rank.
        digests: their digest on each rank.
        of_first_ranks: keys of tensors of which those of the first rank that has them are saved; of others, rank 0's.

    Raises:
        CheckpointError: one differs, or rank 0 does not have it, so that it would be lost.
    """
    if len(set(digests)) == 1:
        return
    # Rare: some ranks have no plain values, small ones of other shapes, or there is an error.
    of_ranks = [PlainTensors.decode(content) for content in meeting.gather(own_tensors.encode())]
    problem = first_lost_tensor(of_ranks, of_first_ranks)
    if problem is not None:
        raise CheckpointError(problem)


def first_lost_tensor(of_ranks: list[PlainTensors], of_first_ranks: Container[str] = ()) -> str | None:
    """Describes the first large tensor that would be lost; None if there is none.

    Args:
        of_ranks: plain tensors of each rank.
        of_first_ranks: see `check_plain_tensors_agree`.
    """
    saved = {path: (0, *found) for path, found in of_ranks[0].found.items()}
    for rank, of_rank in enumerate(of_ranks[1:], start=1):
        for path, (kind, digest) in sorted(of_rank.found.items()):
            if path not in saved and path in of_first_ranks:
                saved[path] = rank, kind, digest
            if path not in saved:
                if digest is not None:
                    return _problem(path, f"rank {rank} has it ({kind}), and rank 0 does not")
                continue
            first, kind_saved, digest_saved = saved[path]
            if digest is None and digest_saved is None:
                continue
            if kind != kind_saved:
                return _problem(path, f"rank {first} has {kind_saved} and rank {rank} has {kind}")
            if digest != digest_saved:
                return _problem(path, f"the values of rank {first} and rank {rank} differ ({kind})")
    return None


def _problem(path: str, found: str) -> str:
    return (
        f"{path}: a plain tensor of 64 KiB or more must be the same on all ranks, as that of rank 0 is saved, but "
        f"{found}: describe parts of one tensor with trackbed.ShardedTensor, what each rank has of its own with "
        "trackbed.ShardedObject, or leave it out of the state of the other ranks"
    )
