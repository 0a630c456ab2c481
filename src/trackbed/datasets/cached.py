"""Base class of datasets whose samples are defined by an index, which is an entry of the cache."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import torch

from trackbed.cache import Entry, Kind, Request, fingerprint
from trackbed.cache.entry import DataPart, Ingredients
from trackbed.datasets.batches.reader import BatchForm, BatchReader, ReadsBatches
from trackbed.datasets.batches.sources import SampleLayout
from trackbed.datasets.identity import DataChecksum, DatasetFingerprint
from trackbed.datasets.low_level import has_stamps, identify, object_stamps, sampled_tokens
from trackbed.datasets.megatron_dataset import MegatronDataset
from trackbed.errors import ArgumentError

_OURS: Final = __name__.partition(".")[0]
_FOLDER: Final = str(Path(__file__).parents[1])


class IndexInputs(Ingredients, DataPart, Protocol):
    """Inputs of an index, and the part of the data that it is computed from."""


@lru_cache(maxsize=64)
def _as_path(directory: str) -> Path:
    """Returns the path of a folder, as one object for thousands of entries."""
    return Path(directory)


class CachedDataset(MegatronDataset, ReadsBatches):
    """Base class of datasets whose samples are defined by an index, which is an entry of the cache."""

    _KIND: ClassVar[Kind]
    """Builds the index."""
    _INDEX_HOOK: ClassVar[str]
    """Method of Megatron Core that builds the index; a subclass may override it."""
    _SAMPLE_HOOKS: ClassVar[tuple[str, ...]]
    """Methods that make a sample; a subclass may override them."""

    @classmethod
    def builds_its_indices(cls) -> bool:
        """True for a subclass that builds its index itself."""
        return bool(first_override(cls, (cls._INDEX_HOOK,)))

    def makes_its_samples(self) -> bool:
        """True if it overrides how samples are made, so that batches call it for each sample."""
        return is_overridden(self, self._SAMPLE_HOOKS)

    @property
    def _where(self) -> str:
        """Name of the dataset and its split, for errors."""
        return f"{self.dataset_path}, split {self.index_split.name}"

    @property
    def padding(self) -> int:
        """Id that pads short samples and is masked out as a label: the tokenizer's, or -1."""
        return self._pad_token_id

    @abstractmethod
    def _ingredients(self) -> IndexInputs:
        """Returns the inputs of the index."""

    @abstractmethod
    def _index_decisions(self) -> dict[str, Any]:
        """Returns everything that decides the index, besides class and files."""

    @abstractmethod
    def _shaping(self) -> dict[str, Any]:
        """Returns the values, by name, that decide the samples, and neither the index nor the description."""

    def _agreed_besides(self) -> dict[str, Any]:
        """Returns what ranks must agree on besides: fields of `_shaping`, and ids of the tokenizer."""
        return {}

    @abstractmethod
    def _checksum(self) -> str:
        """Returns the CRC-32 of the data that the index is computed from. May read them."""

    @property
    @abstractmethod
    def _stem(self) -> str:
        """Start of the names of the index files, as Megatron Core joins it."""

    @abstractmethod
    def layout(self) -> SampleLayout | None:
        """Returns the layout of the samples in their files; None if a subclass makes them."""

    @abstractmethod
    def batch_form(self, members: Sequence[Any], dataset_id: torch.dtype | None) -> BatchForm:
        """Returns the form of batches of such samples.

        Args:
            members: the datasets of the blend, of one class and configuration; this dataset alone without a blend.
            dataset_id: dtype of the dataset's number in a batch, or None to leave it out.
        """

    @cached_property
    def _decisions(self) -> dict[str, Any]:
        return {"class": type(self).__name__, **self._index_decisions(), "data": identify(self.dataset)}

    @cached_property
    def _index_fingerprint(self) -> str:
        """SHA-256 of everything that decides the index."""
        return fingerprint(self._decisions)

    @property
    def fingerprint(self) -> DatasetFingerprint:
        """SHA-256 of everything that decides the samples: file identities, configuration and order."""
        return DatasetFingerprint.of(self._fingerprint, self)

    @cached_property
    def _fingerprint(self) -> str:
        parts = [self._index_fingerprint, self.unique_description_hash, self._pad_token_id, *self._shaping().values()]
        return fingerprint({"all": parts})

    def identity_fields(self) -> dict[str, Any] | None:
        """Returns everything that decides the samples, by name, without folders; see `sample_fields`."""
        fields = self.sample_fields()
        return None if fields is None else {**fields, "tokens": sampled_tokens(self.dataset)}

    def sample_fields(self) -> dict[str, Any] | None:
        """Returns everything but the tokens that decides the samples, by name, without folders.

        None for a class of others, whose samples may depend on anything.
        """
        if not is_ours(type(self)) or "unique_identifiers" in vars(self):
            return None
        return {**self.agreed_values(), "pad": self._pad_token_id, **self._shaping()}

    @cached_property
    def data_checksum(self) -> DataChecksum:
        """CRC-32 of the lengths that the index is computed from, which files of the same identity may differ in."""
        return DataChecksum(self._checksum, stamps=object_stamps(self.dataset))

    @property
    def agreed_key(self) -> str:
        """Text that is equal for two datasets if and only if their `agreed_values` are."""
        return f"{super().agreed_key} {self._index_fingerprint} {self._agreed_besides()}"

    def agreed_values(self) -> dict[str, Any]:
        """Returns the values, by name, that ranks must agree on; see `MegatronDataset.agreed_values`."""
        data = {"data": self._decisions["data"]}
        return {**data, **super().agreed_values(), **self._decisions, **self._agreed_besides()}

    def _entry(self) -> Entry | None:
        """Returns the cache entry of the index; None if it is kept in memory."""
        directory = self.config.path_to_cache
        if directory is None and not self.config.mock:
            directory = f"{self.dataset.path_prefix}/cache/{type(self).__name__}_indices"
        if directory is None:
            return None
        return Entry(
            directory=_as_path(str(directory)),
            stem=self._stem,
            description=self.unique_description,
            arrays=self._index.names,
            decisions=self._decisions,
            known_fingerprint=self._index_fingerprint,
            data=self._ingredients() if has_stamps(self.dataset) else None,
        )

    def _request(self) -> Request | None:
        """Returns the request for the index, or None if it is kept in memory."""
        entry = self._entry()
        return None if entry is None else Request(entry, self._KIND, self._ingredients())

    def __getstate__(self) -> dict[str, Any]:
        """State without the reader and the checksum, which a copy computes again."""
        state = vars(self).copy()
        for name in ("_cached_batch_reader", "data_checksum"):
            state.pop(name, None)
        return state

    @cached_property
    def _cached_batch_reader(self) -> BatchReader:
        return BatchReader([self], self.batch_form([self], None))

    def _batch_reader(self) -> BatchReader | None:
        return None if self.makes_its_samples() else self._cached_batch_reader


def check_overrides(cls: type, *names: str, advice: str) -> None:
    """Checks that a class derived from one of ours defines none of some methods.

    Args:
        cls: class of an object that is being made.
        names: names of the methods.
        advice: what to do instead, for the error.

    Raises:
        ArgumentError: it defines one; the message names it.
    """
    found = first_override(cls, names)
    if found:
        raise ArgumentError(f"{found} must not be overridden, because it is never called: {advice}")


def is_ours(what: Any) -> bool:
    """True for a class of Trackbed, or a function whose code is Trackbed's."""
    if isinstance(what, type):
        return what.__module__.partition(".")[0] == _OURS
    code = getattr(what, "__code__", None)
    return code is not None and code.co_filename.startswith(_FOLDER)


def is_overridden(dataset: object, names: tuple[str, ...]) -> bool:
    """True if one of these methods is not ours: in the class of a dataset, or as an attribute of its own."""
    cls, own = type(dataset), vars(dataset)
    if cls.__getattribute__ is not object.__getattribute__:
        return True
    return any(name in own or not is_ours(getattr(cls, name)) for name in names)


def first_override(cls: type, names: tuple[str, ...]) -> str:
    """Name of the first of these methods that a class has, and not from ours; empty if there is none."""
    for name in names:
        if hasattr(cls, name) and not is_ours(getattr(cls, name)):
            owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
            return f"{owner.__name__}.{name}"
    return ""
