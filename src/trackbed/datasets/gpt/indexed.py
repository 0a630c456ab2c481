"""GPT samples in the orders "megatron" and "balanced", which are defined by three indices.

Shapes: R samples.
"""

from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.cache import LazyArrays
from trackbed.datasets.gpt.indices import GPTIndices
from trackbed.datasets.gpt.visits import ARRAYS, VisitArrays, VisitedSamples
from trackbed.datasets.samples import IndexArrays, SampleLocations, SamplePieces
from trackbed.kernels import Visits


class IndexedSamples:
    """Samples that are defined by the three indices of a dataset. See `Samples`."""

    def __init__(self, indices: GPTIndices) -> None:
        self.indices = indices
        self.index = IndexArrays(*ARRAYS)

    def __len__(self) -> int:
        """R, samples in the order."""
        replaced, arrays = self.index.replacement("sample_index"), self.index.arrays
        if replaced is not None:
            return len(replaced) - 1
        if isinstance(arrays, LazyArrays):
            return arrays.resolve().specs["sample_index"].shape[0] - 1
        return self.indices.plan.num_samples if arrays is None else len(arrays["sample_index"]) - 1

    def can_give(self, num_samples: int) -> bool:
        """True if there are at least `num_samples` samples."""
        arrays, indices = self.index.arrays, self.indices
        if not isinstance(arrays, LazyArrays) or arrays.is_resolved:
            return num_samples <= len(self)
        # Partial samples are counted in single precision, so that there may be fewer than requested.
        is_requested = num_samples <= (indices.num_samples or 0) and not indices.keep_partial
        return is_requested or num_samples <= indices.plan.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one epoch of the split. Reads the lengths of its documents."""
        return self.indices.samples_per_epoch

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the indices, besides the files."""
        return self.indices.decisions()

    def checksum(self) -> str:
        """Returns the CRC-32 of the split's document lengths."""
        arrays = self.index.arrays
        found = arrays.resolve().data_crc32 if isinstance(arrays, LazyArrays) else ""
        return found or self.indices.checksum

    def layout(self) -> Visits:
        """Returns the three indices."""
        documents, rows, shuffle = self.index.several()
        return Visits(documents, rows, shuffle, self.indices.keep_partial)

    def locate(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns the positions unchanged: the kernel reads the shuffle index."""
        return np.zeros(len(positions), dtype=np.int32), positions

    def pieces(self, position: int) -> SamplePieces:
        """Returns the pieces of the sample at a position."""
        return self._visited.pieces(self._visits, position)

    def read(self, position: int, *, padding: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the tokens of the sample at a position, and the documents of its pieces."""
        return self._visited.read(self._visits, position, padding=padding)

    @property
    def _visits(self) -> VisitArrays:
        documents, rows, shuffle = self.index.several()
        return VisitArrays(documents, rows, shuffle, self.index.arrays or {})

    def __getstate__(self) -> dict[str, Any]:
        """The indices and a copy of their arrays that do not lie in the cache."""
        return {"indices": self.indices, "index": copy(self.index)}

    @cached_property
    def _visited(self) -> VisitedSamples:
        indices = self.indices
        return VisitedSamples(
            indices.dataset,
            length=indices.sequence_length + indices.extra_token,
            extra_token=indices.extra_token,
            may_be_short=indices.keep_partial,
        )
