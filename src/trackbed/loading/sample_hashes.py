"""Digests of samples, by which runs are compared: SHA-256 of the tokens, on any number of ranks the same.

Shapes: B samples of a batch, S tokens of a sample.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class SampleHashes:
    """The samples of a batch: where they are, and what they are."""

    positions: Sequence[int]
    """B positions in the dataset."""
    digests: bytes
    """Digest of each sample, 32 bytes each."""
    datasets: Sequence[int]
    """Number of the dataset in the blend, of each sample; 0 without a blend."""
    num_tokens: int
    """S."""


def joined(batches: Sequence[SampleHashes]) -> SampleHashes:
    """Returns the samples of one batch or more, one after the other, as one batch.

    >>> joined([SampleHashes([3], b"", [0], 8), SampleHashes([1, 2], b"", [0, 1], 8)]).positions
    [3, 1, 2]
    """
    positions = [position for one in batches for position in one.positions]
    datasets = [dataset for one in batches for dataset in one.datasets]
    return SampleHashes(positions, b"".join(one.digests for one in batches), datasets, batches[0].num_tokens)


def digests_of(tokens: torch.Tensor) -> bytes:
    """Returns the SHA-256 of each row of `[B, S]` tokens as int64, little-endian.

    >>> digests_of(torch.tensor([[1, 2], [3, 4]])).hex()[:16], len(digests_of(torch.zeros((3, 5))))
    ('0c730b69905c5ef7', 96)
    """
    rows = tokens.cpu().numpy().astype("<i8", copy=False)
    return b"".join(hashlib.sha256(row.tobytes()).digest() for row in rows)


def hash_of_batch(samples: Iterable[tuple[int, bytes]]) -> str:
    """Returns the SHA-256, in hexadecimal digits, of the digests of samples in the order of their positions.

    Args:
        samples: position and digest of each sample; one that is named twice, as ranks of a tensor-parallel group read
            the same, counts once.

    >>> hash_of_batch([(1, b"b"), (0, b"a")]) == hashlib.sha256(b"ab").hexdigest()
    True
    """
    return hashlib.sha256(b"".join(digest for _, digest in sorted(dict(samples).items()))).hexdigest()
