"""GPT samples in the orders "megatron" and "balanced", which three indices name.

Shapes: R samples.
"""

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.cache import LazyArrays
from trackbed.datasets.gpt_indices import GPTIndices
from trackbed.datasets.gpt_visits import ARRAYS, VisitArrays, VisitedSamples
from trackbed.datasets.index_arrays import IndexArrays
from trackbed.datasets.samples import Draws, Pieces
from trackbed.kernels import Visits

__all__ = ["IndexedSamples"]


class IndexedSamples:
    """Samples that are named by the three indices of a dataset. See `Samples`.

    Args:
        indices: what decides the indices.
    """

    def __init__(self, indices: GPTIndices) -> None:
        self.indices = indices
        self.index = IndexArrays(*ARRAYS)

    def __len__(self) -> int:
        """R, samples in the order."""
        arrays = self.index.arrays
        if isinstance(arrays, LazyArrays):
            return arrays.specs["sample_index"].shape[0] - 1
        return self.indices.plan.num_samples if arrays is None else len(arrays["sample_index"]) - 1

    def can_give(self, num_samples: int) -> bool:
        """True if there are so many samples."""
        arrays, indices = self.index.arrays, self.indices
        if not isinstance(arrays, LazyArrays) or arrays.is_resolved:
            return num_samples <= len(self)
        # Partial samples are counted in single precision, which may fall short of what was requested.
        is_requested = num_samples <= (indices.num_samples or 0) and not indices.keep_partial
        return is_requested or num_samples <= indices.plan.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the tokens of the split give once. Reads the lengths of its documents."""
        return self.indices.samples_per_epoch

    def decisions(self) -> dict[str, Any]:
        """Everything that decides the indices, besides the files."""
        return self.indices.decisions()

    def checksum(self) -> str:
        """CRC-32 of the tokens in each of the split's documents."""
        arrays = self.index.arrays
        found = arrays.data_crc32 if isinstance(arrays, LazyArrays) else ""
        return found or self.indices.checksum

    def layout(self) -> Visits:
        """The indices."""
        documents, rows, shuffle = self.index.several()
        return Visits(documents, rows, shuffle, self.indices.keep_partial)

    def locate(self, positions: npt.NDArray[np.int64]) -> Draws:
        """The positions themselves: the kernel reads the shuffle index."""
        return np.zeros(len(positions), dtype=np.int32), positions

    def pieces(self, position: int) -> Pieces:
        """The documents that the sample at a position comes from."""
        return self._visited.pieces(self._visits, position)

    def read(self, position: int, *, padding: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens of the sample at a position, and the documents of its pieces."""
        return self._visited.read(self._visits, position, padding=padding)

    @property
    def _visits(self) -> VisitArrays:
        documents, rows, shuffle = self.index.several()
        return VisitArrays(documents, rows, shuffle, self.index.arrays or {})

    @cached_property
    def _visited(self) -> VisitedSamples:
        indices = self.indices
        return VisitedSamples(
            indices.dataset,
            length=indices.sequence_length + indices.extra_token,
            extra_token=indices.extra_token,
            may_be_short=indices.keep_partial,
        )
