"""GPT samples in the order "packed": whole documents in packs, planned from their lengths.

Shapes: P packs in one epoch, S places of a pack, M entries of a row of borders.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from trackbed.datasets.batches.sources import PackedDocuments, SampleLayout
from trackbed.datasets.gpt.consecutive import consecutive_run
from trackbed.datasets.gpt.instant import StoredSample
from trackbed.datasets.low_level import trained_tokens
from trackbed.datasets.samples import NO_INDEX, IndexArrays, SampleLocations, SamplePieces
from trackbed.errors import ArgumentError, PlanError
from trackbed.index import PERMUTATION_VERSION, InstantOrder
from trackbed.index.packing import PACKING_VERSION, Packs, Pieces
from trackbed.index.prefetch import PrefetchedOrder
from trackbed.index.split_mix import split_mix
from trackbed.kernels.packing import PackShape
from trackbed.tokens import IndexedDataset, IndexedGroup
from trackbed.tokens.idx_header import checksum_lengths
from trackbed.tokens.trained_tokens import TrainedTokens

_STREAM: Final = 0x9E6C63D0876A9A47
"""Start of the keys of epochs, apart from those of other shuffles."""


@dataclass(frozen=True)
class PackedSamples:
    """Samples that are packs of whole documents. See `Samples`.

    The number of a stored sample is epoch x P + pack: documents of one length are permuted in each epoch, so that they
    meet others.

    Args:
        dataset: the file.
        documents: consecutive documents of the split, or None for all of them.
        num_samples: length of the order, or None for one epoch.
        shape: length of a pack, and what becomes of longer documents.
        most_documents: most documents in a pack; None for any number.
        pack_window: documents that are packed together; None for all.
        seed: seed of the shuffles.
        block: consecutive packs that are moved as one block.
        window: consecutive blocks whose packs are shuffled together.
        where: name of the dataset and its split, for errors.

    Raises:
        ArgumentError: the dataset is not an indexed file, or the documents are not consecutive.
        PlanError: samples are requested, and no document has two tokens.
    """

    dataset: Any
    documents: npt.NDArray[np.integer[Any]] | None
    num_samples: int | None
    shape: PackShape
    most_documents: int | None
    pack_window: int | None
    seed: int
    block: int = 1
    window: int = 1
    where: str = ""
    index: ClassVar[IndexArrays] = NO_INDEX

    def __post_init__(self) -> None:
        """Checks the documents, and that there are packs if samples are requested."""
        consecutive_run(self.dataset, self.documents, order="packed", where=self.where)
        if self.num_samples and not self.samples_per_epoch:
            raise PlanError(
                f"{self.where}: must have a document of two tokens to give {self.num_samples} packs, found none"
            )

    @cached_property
    def run(self) -> tuple[int, int]:
        """First document of the split, and one after the last."""
        return consecutive_run(self.dataset, self.documents, order="packed", where=self.where)

    @cached_property
    def packs(self) -> Packs:
        """The packs of an epoch. Reads the lengths of all documents."""
        start, stop = self.run
        # Lengths in a file are not aligned.
        lengths = np.require(self.dataset.sequence_lengths[start:stop], dtype=np.int32, requirements=["C", "A"])
        return Packs(lengths, self.shape, most_documents=self.most_documents, window=self.pack_window)

    @property
    def samples_per_epoch(self) -> int:
        """P, number of packs in one epoch of the split."""
        return len(self.packs)

    @cached_property
    def order(self) -> InstantOrder:
        """Order of the packs."""
        return InstantOrder(
            sizes=[self.samples_per_epoch],
            weights=[1],
            seed=self.seed,
            num_samples=len(self),
            block=self.block,
            window=self.window,
        )

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the samples, besides the file."""
        return {
            "order": "packed",
            "version": [PACKING_VERSION, InstantOrder.VERSION, PERMUTATION_VERSION],
            "documents": list(self.run),
            "num_samples": None if self.num_samples is None else int(self.num_samples),
            "sequence_length": self.shape.sequence_length,
            "random_seed": int(self.seed),
            "locality": [int(self.block), int(self.window)],
            "packs": [self.shape.multiple, self.shape.long_documents, self.most_documents, self.pack_window],
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

    def stored(self, position: int) -> int:
        """Returns the number of the stored sample at a position in `[-len, len)`; a `StoredSample` as it is."""
        if isinstance(position, StoredSample):
            if position < 0 or not self.samples_per_epoch:
                raise IndexError(f"a stored sample must be at least 0, found {int(position)}")
            return int(position)
        wanted = position + len(self) if position < 0 else position
        if not 0 <= wanted < len(self):
            raise IndexError(f"a sample must be in [-{len(self)}, {len(self)}), found {position}")
        return int(self.order.locate_visits([wanted])[1][0])

    def find(self, stored: npt.NDArray[np.int64]) -> Pieces:
        """Returns the pieces of stored samples; documents are numbered as in the file."""
        epochs, packs = np.divmod(stored, max(self.samples_per_epoch, 1))
        keys = np.array([self._key_of(epoch) for epoch in epochs.tolist()], dtype=np.uint64)
        pieces, firsts = self.packs.find(packs, keys=keys)
        pieces[:, 0] += self.run[0]
        return pieces, firsts

    def _key_of(self, epoch: int) -> int:
        return split_mix(split_mix(self.seed ^ _STREAM, 0), epoch)

    @cached_property
    def prefetched(self) -> PrefetchedOrder:
        """The order, with prefetch for sequential access."""
        return PrefetchedOrder(self.order, has_visits=True)

    @cached_property
    def trained(self) -> list[TrainedTokens | None]:
        """Trained tokens of each pair of the dataset; None for one all of whose tokens are."""
        pairs = self.dataset.members if isinstance(self.dataset, IndexedGroup) else [self.dataset]
        return [trained_tokens(pair) for pair in pairs]

    def trained_labels(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Returns True for each label of a piece that is trained: tokens `[start + 1, stop)` of a document."""
        member, sequence = self.dataset.find(document) if isinstance(self.dataset, IndexedGroup) else (0, document)
        found = self.trained[member]
        if found is None:
            return np.ones(stop - start - 1, dtype=np.bool_)
        length = int(self.dataset.sequence_lengths[document])
        return found.of(sequence, length)[start + 1 : stop]

    def can_give(self, num_samples: int) -> bool:
        """True if there are at least `num_samples` samples."""
        return num_samples <= len(self)

    def layout(self) -> SampleLayout:
        """Returns a layout that says where the files are: the pieces of packs are found on each access."""
        return PackedDocuments(self.samples_per_epoch)

    def locate(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns dataset 0 and the number of the stored sample at each position."""
        return self.prefetched.locate(positions) if len(positions) else (np.zeros(0, dtype=np.int32), positions)

    def pieces(self, position: int) -> SamplePieces:
        """Returns the pieces of the sample at a position, each with the token behind its last input."""
        documents, starts, stops = self.find(np.array([self.stored(position)]))[0].T
        return SamplePieces(documents.tolist(), starts.tolist(), (stops + 1).tolist())

    def read(self, position: int, *, padding: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Packs have no text as a whole.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(f"{self.where}: the text of a pack must be read by its pieces, found a call for the whole")
