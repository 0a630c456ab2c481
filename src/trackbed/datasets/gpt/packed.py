"""GPT samples in the order "packed": whole documents in packs, planned from their lengths.

Shapes: P packs in one epoch, S places of a pack, M entries of a row of borders.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from trackbed.datasets.batches.sources import PackedDocuments, SampleLayout
from trackbed.datasets.gpt.computed import ComputedSamples
from trackbed.datasets.low_level import trained_tokens
from trackbed.datasets.samples import SamplePieces
from trackbed.errors import ArgumentError, PlanError
from trackbed.index import PERMUTATION_VERSION, InstantOrder
from trackbed.index.contiguous_packs import CONTIGUOUS_VERSION, ContiguousPacks
from trackbed.index.packing import PACKING_VERSION, Packs, Pieces
from trackbed.index.split_mix import split_mix
from trackbed.kernels.packing import PackShape
from trackbed.tokens import IndexedGroup
from trackbed.tokens.seal import sum_beside
from trackbed.tokens.trained_tokens import TRAINED, TrainedTokens

_STREAM: Final = 0x9E6C63D0876A9A47
"""Start of the keys of epochs, apart from those of other shuffles."""


@dataclass(frozen=True, kw_only=True)
class PackedSamples(ComputedSamples):
    """Samples that are packs of whole documents. See `Samples`.

    The number of a stored sample is epoch x P + pack: documents of one length are permuted in each epoch, so that they
    meet others.

    Args:
        shape: length of a pack, and what becomes of longer documents.
        most_documents: most documents in a pack; None for any number.
        pack_window: documents that are packed together; None for all.
        is_contiguous: True for packs of documents in the order of the file: see `ContiguousPacks`.

    Raises:
        ArgumentError: the dataset is not an indexed file, or the documents are not consecutive.
        PlanError: samples are requested, and no document has two tokens.
    """

    shape: PackShape
    most_documents: int | None
    pack_window: int | None
    is_contiguous: bool = False
    _ORDER: ClassVar[str] = "packed"
    _HAS_VISITS: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks the documents, and that there are packs if samples are requested."""
        super().__post_init__()
        if self.num_samples and not self.samples_per_epoch:
            raise PlanError(
                f"{self.where}: must have a document of two tokens to give {self.num_samples} packs, found none"
            )

    @cached_property
    def packs(self) -> Packs | ContiguousPacks:
        """The packs of an epoch. Reads the lengths of all documents."""
        start, stop = self.run
        # Lengths in a file are not aligned.
        lengths = np.require(self.dataset.sequence_lengths[start:stop], dtype=np.int32, requirements=["C", "A"])
        if self.is_contiguous:
            return ContiguousPacks(lengths, self.shape)
        return Packs(lengths, self.shape, most_documents=self.most_documents, window=self.pack_window)

    @property
    def samples_per_epoch(self) -> int:
        """P, number of packs in one epoch of the split."""
        return len(self.packs)

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the samples, besides the file."""
        return {
            **super().decisions(),
            "version": [PACKING_VERSION, InstantOrder.VERSION, PERMUTATION_VERSION],
            "sequence_length": self.shape.sequence_length,
            "packs": [self.shape.multiple, self.shape.long_documents, self.most_documents, self.pack_window],
            **({"contiguous": CONTIGUOUS_VERSION} if self.is_contiguous else {}),
            **({"masks": masks} if any(masks := self._sums_of_masks) else {}),
        }

    def find(self, stored: npt.NDArray[np.int64]) -> Pieces:
        """Returns the pieces of stored samples; documents are numbered as in the file."""
        pieces, firsts = self.packs.find_visits(stored, seed=self._seed_of_keys)
        if self._first_document:
            pieces[:, 0] += self._first_document
        return pieces, firsts

    @cached_property
    def _first_document(self) -> int:
        return self.run[0]

    def holding(self, document: int, epoch: int) -> npt.NDArray[np.int64]:
        """Returns the numbers of the packs that have a piece of a document of the file in an epoch."""
        start, stop = self.run
        if not start <= document < stop:
            return np.empty(0, dtype=np.int64)
        return self.packs.holding(document - start, key=self._key_of(epoch))

    def _key_of(self, epoch: int) -> int:
        return split_mix(self._seed_of_keys, epoch)

    @cached_property
    def _seed_of_keys(self) -> int:
        return split_mix(self.seed ^ _STREAM, 0)

    @cached_property
    def _sums_of_masks(self) -> list[str]:
        """Checksums of the mask of each pair, as its seal has them; empty for a pair without one."""
        pairs = self.dataset.members if isinstance(self.dataset, IndexedGroup) else [self.dataset]
        return [sum_beside(pair.path_prefix, TRAINED) for pair in pairs]

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

    def layout(self) -> SampleLayout:
        """Returns a layout that says where the files are: the pieces of packs are found on each access."""
        return PackedDocuments(self.samples_per_epoch)

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
