"""Typed wrapper of the kernel that builds the indices of many small datasets in one call.

Shapes: N datasets, each with D documents, V visits, R samples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.isa import chosen_level


class SmallDataset(NamedTuple):
    """Parameters of a dataset whose documents are consecutive in their file."""

    first: int
    """Number of the first document."""
    num_documents: int
    num_epochs: int
    """At least 1."""
    num_samples: int
    """Samples in all epochs."""
    samples_before_last: int
    """Samples of all epochs but the last if the last one is shuffled separately, else -1."""
    sequence_length: int
    """At least 1."""
    extra_token: int
    """1 if a sample also holds the first token of the next one, else 0."""
    seed: int
    """In `[0, 2**32)`."""


class SmallIndices(NamedTuple):
    """The three indices of a dataset."""

    visits: npt.NDArray[np.int32]
    """`[V]` document of each visit."""
    rows: npt.NDArray[np.int32]
    """`[R + 1, 2]` visit and token offset in that visit at which each sample starts."""
    order: npt.NDArray[np.uint32]
    """`[R]` sample at each position."""


def small_indices(
    datasets: Sequence[SmallDataset], lengths: Sequence[npt.NDArray[np.int32]], *, poll: Poll = None
) -> list[SmallIndices]:
    """Builds the document, sample and shuffle indices of each dataset.

    Args:
        datasets: `[N]` parameters of the datasets. Numbers of documents, visits and samples must fit 31 bits.
        lengths: for each dataset, `[D]` tokens in each of its documents, which may be unaligned.
        poll: progress callback, called with the number of datasets done.

    Returns:
        `[N]` indices, which are views of one array.

    Raises:
        ArgumentError: lengths are not a vector of int32, the length of a visited document is negative, or an argument
            is out of range.
    """
    described = np.array(datasets, dtype=np.int64).reshape(-1, len(SmallDataset._fields))
    _check(described, lengths)
    _, documents, epochs, samples = described[:, :4].T
    sizes = np.stack([epochs * documents, 2 * (samples + 1), samples], axis=1).reshape(-1)
    ends = np.cumsum(sizes)
    indices = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint32)
    raw = [one.view(np.uint8) for one in lengths]
    done = _native.small_indices(described.reshape(-1), raw, indices, chosen_level(), current_poll(poll))
    if done < len(datasets):
        wanted = f"each of {documents[done]} documents of dataset {done} must have a length of at least 0"
        raise ArgumentError(
            f"{wanted}, found {len(lengths[done])} of them, the shortest {min(lengths[done], default=None)}"
        )
    borders, signed = [0, *ends.tolist()], indices.view(np.int32)
    return [
        SmallIndices(signed[visits:rows], signed[rows:order].reshape(-1, 2), indices[order:end])
        for visits, rows, order, end in zip(borders[:-1:3], borders[1::3], borders[2::3], borders[3::3], strict=True)
    ]


def _check(described: npt.NDArray[np.int64], lengths: Sequence[npt.NDArray[np.int32]]) -> None:
    if len(described) != len(lengths):
        raise ArgumentError(f"there must be lengths for each of {len(described)} datasets, found {len(lengths)}")
    for one in lengths:
        if one.ndim != 1 or one.dtype != np.int32 or not one.flags.c_contiguous:
            raise ArgumentError(
                f"lengths must be a contiguous vector of int32, found dtype {one.dtype} and shape {list(one.shape)}"
            )
    lowest = np.array([0, 0, 1, 0, -1, 1, 0, 0])
    highest = np.array([2**31 - 1] * 4 + [2**31 - 1, 2**31 - 1, 1, 2**32 - 1])
    wrong = np.argwhere((described < lowest) | (described > highest))
    if len(wrong):
        dataset, field = wrong[0].tolist()
        name = SmallDataset._fields[field]
        raise ArgumentError(f"{name} must be in [{lowest[field]}, {highest[field]}], found {described[dataset, field]}")
    _, documents, epochs, samples, apart, *_ = described.T
    visits = epochs * documents
    if ((visits > highest[0]) | (apart > samples) | ((apart >= 0) & (epochs < 2))).any():
        limits = "visits must fit 31 bits, and samples before the last epoch be at most num_samples of several epochs"
        raise ArgumentError(f"{limits}, found {visits} and {apart}")
