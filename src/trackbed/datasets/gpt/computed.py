"""GPT samples in an order without an index: what "instant" and "packed" have in common.

Shapes: R samples in one epoch.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trackbed.datasets.low_level import check_documents, num_sequences
from trackbed.datasets.samples import NO_INDEX, IndexArrays, SampleLocations
from trackbed.errors import ArgumentError
from trackbed.index import InstantOrder
from trackbed.index.prefetch import PrefetchedOrder
from trackbed.tokens import IndexedDataset, IndexedGroup
from trackbed.tokens.idx_header import checksum_lengths


class StoredSample(int):
    """Number of a sample in its dataset, as opposed to its position in a shuffled order.

    A blend in an order without an index computes which sample of a dataset it draws, and passes its number so.
    """


@dataclass(frozen=True, kw_only=True)
class ComputedSamples(ABC):
    """Samples of consecutive documents of a file, located on each access. See `Samples`.

    Args:
        dataset: the file.
        documents: consecutive documents of the split, or None for all of them.
        num_samples: length of the order, or None for one epoch.
        seed: seed of the shuffles.
        block: consecutive samples that are moved as one block.
        window: consecutive blocks whose samples are shuffled together.
        where: name of the dataset and its split, for errors.

    Raises:
        ArgumentError: the dataset is not an indexed file, or the documents are not consecutive.
    """

    dataset: Any
    documents: npt.NDArray[np.integer[Any]] | None
    num_samples: int | None
    seed: int
    block: int = 1
    window: int = 1
    where: str = ""
    index: ClassVar[IndexArrays] = NO_INDEX
    _ORDER: ClassVar[str]
    _HAS_VISITS: ClassVar[bool] = False
    """True if the number of a stored sample has its epoch, too."""

    def __post_init__(self) -> None:
        """Checks that the split is a contiguous part of an indexed file."""
        if not isinstance(self.dataset, (IndexedDataset, IndexedGroup)):
            found = type(self.dataset).__name__
            raise ArgumentError(f"order={self._ORDER!r} cuts its samples from an IndexedDataset, found a {found}")
        run = self.documents
        if run is not None and len(run) and (int(run[-1]) - int(run[0]) + 1 != len(run) or (np.diff(run) != 1).any()):
            raise ArgumentError(
                f"order={self._ORDER!r} needs consecutive documents in a split, found {len(run)} others"
            )
        check_documents(run, self.run, num_sequences(self.dataset), where=self.where)

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """R, number of samples in one epoch of the split."""

    @property
    def run(self) -> tuple[int, int]:
        """First document of the split, and one after the last."""
        if self.documents is None:
            return 0, len(self.dataset.sequence_lengths)
        return (int(self.documents[0]), int(self.documents[-1]) + 1) if len(self.documents) else (0, 0)

    @cached_property
    def order(self) -> InstantOrder:
        """Order of the samples."""
        options: dict[str, Any] = {"num_samples": len(self), "block": self.block, "window": self.window}
        return InstantOrder(sizes=[self.samples_per_epoch], weights=[1], seed=self.seed, **options)

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the samples, besides the file."""
        return {
            "order": self._ORDER,
            "documents": list(self.run),
            "num_samples": None if self.num_samples is None else int(self.num_samples),
            "random_seed": int(self.seed),
            "locality": [int(self.block), int(self.window)],
        }

    def checksum(self) -> str:
        """Returns the CRC-32 of the split's document lengths. Reads them."""
        start, stop = self.run
        if isinstance(self.dataset, IndexedDataset) and (start, stop) == (0, self.dataset.index.sequence_count):
            return self.dataset.index.checksum_lengths()
        return checksum_lengths(self.dataset.sequence_lengths[start:stop])

    def __getstate__(self) -> dict[str, Any]:
        """State with the arguments only; a copy computes the rest again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        """Samples in the order."""
        return self.samples_per_epoch if self.num_samples is None else self.num_samples

    def can_give(self, num_samples: int) -> bool:
        """True if there are at least `num_samples` samples."""
        return num_samples <= len(self)

    def stored(self, position: int) -> int:
        """Returns the number in the dataset of the sample at a position in `[-len, len)`; a `StoredSample` as it is."""
        if isinstance(position, StoredSample):
            size = self.samples_per_epoch
            if position < 0 or not size or (position >= size and not self._HAS_VISITS):
                raise IndexError(f"a stored sample must be in [0, {size}), found {int(position)}")
            return int(position)
        wanted = position + len(self) if position < 0 else position
        if not 0 <= wanted < len(self):
            raise IndexError(f"a sample must be in [-{len(self)}, {len(self)}), found {position}")
        order = self.order
        found = order.locate_visits([wanted]) if self._HAS_VISITS else order.locate([wanted])
        return int(found[1][0])

    @cached_property
    def prefetched(self) -> PrefetchedOrder:
        """The order, with prefetch for sequential access."""
        return PrefetchedOrder(self.order, has_visits=self._HAS_VISITS)

    def locate(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns dataset 0 and the number in the dataset of the sample at each position."""
        return self.prefetched.locate(positions) if len(positions) else (np.zeros(0, dtype=np.int32), positions)
