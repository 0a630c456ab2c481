"""Blends: several datasets drawn from in turn, each in proportion to its weight.

Shapes: K datasets, N samples.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from trackbed.cache import Entry, Request, fingerprint
from trackbed.datasets.batches.reader import BatchReader, ReadsBatches
from trackbed.datasets.blend.balanced import BalancedOrder
from trackbed.datasets.blend.greedy import GreedyOrder
from trackbed.datasets.blend.instant import InstantBlend
from trackbed.datasets.blend.order import ARRAYS, BlendOrder, BlendSpec
from trackbed.datasets.cached import CachedDataset, check_overrides, is_ours
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.gpt.dataset import GPTDataset
from trackbed.datasets.identity import DataChecksum, DatasetFingerprint, joined
from trackbed.datasets.low_level import sampled_tokens
from trackbed.datasets.megatron_dataset import MegatronDataset, describe_blend, description_now, md5_of, samples_text
from trackbed.datasets.samples import IndexArray, IndexArrays, SampleLocations
from trackbed.errors import ArgumentError
from trackbed.index import Order
from trackbed.index.blend import dataset_index_dtype
from trackbed.index.splits import normalize

logger = logging.getLogger(__name__)

_MOST_SHOWN = 4
"""Datasets that a `repr` lists."""
_MOST_READ = 256
"""Datasets of a blend of which a position has a digest of tokens."""

_Dataset = torch.utils.data.Dataset[Any]
_ORDERS: Final[Mapping[str, Callable[[BlendSpec], BlendOrder]]] = {
    "megatron": GreedyOrder,
    "balanced": BalancedOrder,
    "instant": InstantBlend,
    "packed": InstantBlend,
}


class BlendedDataset(_Dataset, ReadsBatches):
    """A blend; its sample k is the `dataset_sample_index[k]`-th of dataset `dataset_index[k]`.

    A dataset of weight 0 keeps its number and is never drawn. In the order "instant" these arrays do not exist; `order`
    computes them.

    Args:
        datasets: at least one, all of one class and split.
        weights: `[K]` shares if `size` is given, else the number of samples drawn from each dataset.
        size: N, or None for the sum of the weights.
        config: configuration of the blend.

    Raises:
        ArgumentError: datasets of several classes or splits, weights of several types or of another number, or a weight
            or `size` out of range.
        PlanError: in the order "instant", a dataset that is drawn from has no samples, or exceeds its limit of epochs.
        OversampleError: the blend draws more samples from a dataset than it has.
        CacheError: the indices cannot be read, built or written.
    """

    dataset_index = IndexArray()
    dataset_sample_index = IndexArray()

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        check_overrides(type(self), "_build_indices", advice="wrap the datasets of the blend, or override __getitem__")
        _check_members(datasets, weights, size)
        if len(datasets) == 1:
            logger.info("%s: a blend of one dataset", datasets[0].dataset_path)
        self.datasets = datasets
        self.split = datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(weights)
        self.size = size
        self.config = config

        spec = BlendSpec(datasets, self.weights, size, self.split, config)
        self._order = _ORDERS[config.order](spec)
        if self._index.is_missing and not config.defer_npy_index_mmap:
            self._order.check()
            self._index.open(self._request(), self._order.build)

    @property
    def order(self) -> Order | None:
        """The order as a lookup of many positions; None if there are no samples and no index."""
        return self._opened.order

    @property
    def _index(self) -> IndexArrays:
        return self._order.index

    @property
    def _opened(self) -> BlendOrder:
        """The order; opens its index first if that was deferred."""
        if self._index.is_missing:
            self._index.open_late(self._request(), self._order.build, self.config)
        return self._order

    @cached_property
    def unique_description(self) -> str:
        """Description as written by Megatron Core. Computed on first use."""
        identifiers: OrderedDict[str, Any] = OrderedDict()
        identifiers["class"] = type(self).__name__
        identifiers["datasets"] = [description_now(dataset) for dataset in self.datasets]
        identifiers["split"] = self.split.name
        identifiers["weights"] = self.weights
        identifiers["size"] = self.size
        if self.config.renormalize_blend_weights is not None:
            identifiers["renormalize_blend_weights"] = self.config.renormalize_blend_weights
        return describe_blend(identifiers)

    @cached_property
    def unique_description_hash(self) -> str:
        """MD5 of the description, which names the index files."""
        return md5_of(self.unique_description)

    @property
    def fingerprint(self) -> DatasetFingerprint:
        """SHA-256 of everything that decides the samples, the identity of all files included."""
        return DatasetFingerprint.of(self._fingerprint, self)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint({**self._decisions, "description": self.unique_description})

    def identity_fields(self) -> dict[str, Any] | None:
        """Returns everything that decides the samples, by name, without folders; None with classes of others."""
        members = [one for one in self.datasets if isinstance(one, CachedDataset)]
        if len(members) < len(self.datasets) or not is_ours(type(self)):
            return None
        known = [fields for one in members if (fields := one.sample_fields()) is not None]
        if len(known) < len(members):
            return None
        fields = joined(known)
        fields |= {name: value for name, value in self._decisions.items() if name not in ("class", "datasets")}
        if len(members) <= _MOST_READ:
            fields["tokens"] = [sampled_tokens(dataset.dataset) for dataset in members]
        return {**fields, "weights": self.weights}

    @cached_property
    def data_checksum(self) -> DataChecksum:
        """Digest of the checksums of all datasets' data; third-party datasets may have none."""
        parts = [getattr(dataset, "data_checksum", None) for dataset in self.datasets]
        stamps = [None if part is None else part.stamps for part in parts]
        return DataChecksum(self._checksum_data, stamps=None if None in stamps else fingerprint({"all": stamps})[:32])

    def _checksum_data(self) -> str:
        parts = [getattr(dataset, "data_checksum", None) for dataset in self.datasets]
        return fingerprint({"all": ["" if part is None else part.result() for part in parts]})[:32]

    @cached_property
    def _decisions(self) -> dict[str, Any]:
        return {
            "class": type(self).__name__,
            "order": self.config.order,
            "num_datasets": len(self.datasets),
            "datasets": fingerprint({"all": [dataset.fingerprint for dataset in self.datasets]}),
            "weights": fingerprint({"all": self.weights}),
            "size": self.size,
            **self._order.decisions(),
        }

    def _entry(self) -> Entry | None:
        if self.config.path_to_cache is None:
            return None
        return Entry(
            directory=Path(self.config.path_to_cache),
            stem=f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}",
            description=self.unique_description,
            arrays=ARRAYS,
            decisions=self._decisions,
            megatron=dataset_index_dtype(len(self.datasets)) is np.int16,
        )

    def _request(self) -> Request | None:
        """Returns the request for the index, or None if it is kept in memory."""
        return self._order.request(self._entry)

    def __getstate__(self) -> dict[str, Any]:
        """State without the reader and the checksum, which a copy computes again."""
        state = vars(self).copy()
        for name in ("_cached_batch_reader", "data_checksum"):
            state.pop(name, None)
        state["_order"] = copy(self._order)  # its index arrays may be replaced
        return state

    @property
    def _num_samples(self) -> int:
        return int(sum(self.weights)) if self.size is None else self.size

    def __len__(self) -> int:
        """N, samples in the blend."""
        return self._num_samples

    def __repr__(self) -> str:
        """Says what the blend holds; of many datasets, the first ones."""
        total = sum(self.weights) or 1.0
        parts = [
            f"{weight / total:.1%} {dataset.dataset_path}"
            for dataset, weight in zip(self.datasets[:_MOST_SHOWN], self.weights, strict=False)
        ]
        more = [f"{len(self.datasets) - _MOST_SHOWN:,} more"] if len(self.datasets) > _MOST_SHOWN else []
        samples = samples_text(self, self.config)
        return f"<{type(self).__name__}: {self.split.name}, {samples}, from {', '.join([*parts, *more])}>"

    def locate(self, idx: int) -> tuple[int, int]:
        """Returns the dataset of the sample at a position, and the index that the dataset's `__getitem__` takes for it.

        Args:
            idx: in `[-N, N)`.

        Raises:
            IndexError: `idx` is out of range.
            CacheError: the index is damaged.
        """
        return self._opened.sample_at(self._checked(idx))

    def draw(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns the dataset, and the number of the sample in it, at each of some positions in `[0, N)`."""
        return self._draw(positions)

    def _checked(self, idx: int) -> int:
        """Returns the position `idx`, counted from the end if negative."""
        number = as_index(idx)
        position = number + len(self) if number < 0 else number
        if not 0 <= position < len(self):
            raise IndexError(f"a sample must be in [-{len(self)}, {len(self)}), found {number}")
        return position

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Returns one sample: `dataset_id`, then the keys of the dataset's own sample.

        Raises:
            IndexError: `idx` is out of range.
            CacheError: an index is damaged.
        """
        dataset_id, sample = self.locate(idx)
        return {"dataset_id": self._order.label(dataset_id), **self.datasets[dataset_id][sample]}

    @cached_property
    def _cached_batch_reader(self) -> BatchReader | None:
        members = [one for one in self.datasets if isinstance(one, CachedDataset) and not one.makes_its_samples()]
        if type(self).__getitem__ is not BlendedDataset.__getitem__ or len(members) < len(self.datasets):
            return None
        return BatchReader(members, members[0].batch_form(members, self._order.id_dtype))

    def _batch_reader(self) -> BatchReader | None:
        reader = self._cached_batch_reader
        return None if reader is None or self.datasets[0].makes_its_samples() else reader  # type: ignore[attr-defined]  # a CachedDataset

    def _draw(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        order = self._opened
        try:
            return order.draw(positions)
        except IndexError:
            for position in positions.tolist():
                self._checked(position)
            raise


SplitDataset = GPTDataset | BlendedDataset
"""Dataset of a split: of one pair, or a blend."""


def _check_members(datasets: Sequence[MegatronDataset], weights: Sequence[float], size: int | None) -> None:
    if len(datasets) == 0 or len(datasets) != len(weights):
        raise ArgumentError(
            f"a blend needs a weight for each of its datasets, found {len(datasets)} and {len(weights)}"
        )
    for what, found in (
        ("datasets of one class", {type(dataset).__name__ for dataset in datasets}),
        ("datasets of one split", {dataset.index_split.name for dataset in datasets}),
        ("weights of one type", {type(weight).__name__ for weight in weights}),
    ):
        if len(found) > 1:
            raise ArgumentError(f"a blend needs {what}, found {', '.join(sorted(found))}")
    if size is not None and size < 0:
        raise ArgumentError(f"the size of a blend must be at least 0, found {size}")
    for number, weight in enumerate(weights):
        if not 0 <= weight < float("inf") or (size is None and weight != int(weight)):
            kind = "a number of samples" if size is None else "a finite number"
            raise ArgumentError(f"the weight of dataset {number} must be {kind} of at least 0, found {weight}")
