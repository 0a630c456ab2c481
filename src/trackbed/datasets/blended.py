"""Several datasets drawn from in turn, each in proportion to its weight.

Shapes: K datasets, N samples.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import index as as_index
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from trackbed.cache import (
    Allocate,
    Arrays,
    ArraySpec,
    Entry,
    OneByOne,
    Request,
    damage,
    fingerprint,
    in_memory,
)
from trackbed.datasets.balanced import BalancedIndices
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.data_checksum import DataChecksum, DatasetFingerprint
from trackbed.datasets.deferred import advice_on_missing
from trackbed.datasets.description import describe_blend, md5_of
from trackbed.datasets.gathering import Draws, Gatherer, Gathering
from trackbed.datasets.gpt import GPTDataset
from trackbed.datasets.gpt_instant import StoredSample
from trackbed.datasets.megatron import MegatronDataset, description_now
from trackbed.datasets.start import find_index, open_index
from trackbed.errors import ArgumentError, OversampleError, PlanError
from trackbed.index import PERMUTATION_VERSION, BlendStage, InstantOrder, Split
from trackbed.index.balanced import BALANCED_VERSION
from trackbed.index.blend import dataset_index_dtype, exhaustive_blend, greedy_blend
from trackbed.index.prefetch import PrefetchedOrder
from trackbed.index.splits import normalize

__all__ = ["BlendedDataset", "blend"]

logger = logging.getLogger(__name__)

ARRAYS: Final = ("dataset_index", "dataset_sample_index")
_DRAW_COST: Final = 40.0
"""Nanoseconds a sample of a blend, written: more than most blends take, as nothing makes a greedy one quicker."""
_STRETCH: Final = 1 << 20
_Dataset = torch.utils.data.Dataset[Any]


class BlendedDataset(_Dataset, Gathering):
    """A blend; its sample k is the `dataset_sample_index[k]`-th of dataset `dataset_index[k]`.

    A dataset of weight 0 keeps its number and is never drawn. In the order "instant" there are no such arrays: `order`
    says which sample comes k-th.

    Args:
        datasets: at least one, all of one class and split.
        weights: `[K]` shares if `size` is given, else how many samples each dataset gives.
        size: N, or None to take as many samples as the weights say.
        config: what decides the samples.

    Raises:
        ArgumentError: datasets or weights that do not belong together, or weights out of range.
        PlanError: in the order "instant", a dataset that is to be drawn has no samples.
        OversampleError: the blend draws more samples from a dataset than it has.
        CacheError: the indices cannot be read, built or written.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        _check_members(datasets, weights, size)
        if len(datasets) == 1:
            logger.info("%s: a blend of one dataset", datasets[0].dataset_path)
        self.datasets = datasets
        self.split = datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(weights)
        self.size = size
        self.config = config

        if config.order == "instant":
            self.order = self._instant_order()
        else:
            self._keep(None if config.defer_npy_index_mmap else self._open_indices())

    @cached_property
    def unique_description(self) -> str:
        """What it is, in Megatron Core's words; no start that recalls its cache asks."""
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
        """The md5 of the description, which names its files."""
        return md5_of(self.unique_description)

    def _instant_order(self) -> InstantOrder | None:
        """Which sample comes k-th; None where there are none."""
        if self._num_samples == 0:
            return None
        try:
            return self._make_instant_order()
        except (ArgumentError, PlanError) as error:
            paths = ", ".join(str(dataset.dataset_path) for dataset in self.datasets[:3])
            msg = f"the blend of {paths}{' ...' if len(self.datasets) > 3 else ''}, split {self.split.name}: {error}"
            raise PlanError(msg) from error

    def _make_instant_order(self) -> InstantOrder:
        config, is_training = self.config, self.split is Split.train
        stages = [BlendStage(0, tuple(self.weights))]
        if config.blend_stages is not None and is_training:
            stages += [BlendStage(first, tuple(weights)) for first, weights in config.blend_stages]
        order = InstantOrder.staged(
            sizes=[dataset.samples_per_epoch for dataset in self.datasets],  # type: ignore[attr-defined]
            stages=stages,
            seed=config.random_seed,
            num_samples=self._num_samples,
            max_epochs=config.blend_max_epochs if is_training else None,
            when_exhausted=config.blend_when_exhausted,  # type: ignore[arg-type]  # it says what it takes
            block=config.shuffle_block,
            window=config.shuffle_window,
        )
        for ended in order.exhaustions:
            prefix = self.datasets[ended.dataset].dataset_path
            logger.warning(
                "%s: has given its epochs; the blend goes on without it from sample %d", prefix, ended.sample
            )
        return order

    def __getattr__(self, name: str) -> Any:
        """One of the indices, which the arrays may release and map again; or why there is none."""
        arrays = vars(self).get("_arrays")
        if name in ARRAYS and arrays is not None:
            return arrays[name]
        if name in ARRAYS:
            msg = f"{name} needs order='megatron' or 'balanced', found 'instant': ask `order.locate` instead"
            raise AttributeError(msg)
        return self.__getattribute__(name)  # of a property that failed this raises its own words once more

    @property
    def fingerprint(self) -> DatasetFingerprint:
        """SHA-256 of everything that decides the samples, the identity of all files included."""
        return DatasetFingerprint.of(self._fingerprint, self)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint({**self._decisions, "description": self.unique_description})

    @cached_property
    def data_checksum(self) -> DataChecksum:
        """Digest of the checksums of all datasets' data; those of other people's classes have none."""
        return DataChecksum(self._checksum_data)

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
            **({} if self.config.order == "megatron" else self._own_decisions()),
        }

    def _own_decisions(self) -> dict[str, Any]:
        """What decides the orders that are not Megatron Core's, besides."""
        stages = [
            [int(first), [float(weight) for weight in weights]] for first, weights in self.config.blend_stages or ()
        ]
        limits = (
            [self.config.blend_max_epochs, self.config.blend_when_exhausted] if self.config.blend_max_epochs else []
        )
        locality = [self.config.shuffle_block, self.config.shuffle_window]
        versions = [BALANCED_VERSION, InstantOrder.VERSION, PERMUTATION_VERSION]
        return {
            "random_seed": int(self.config.random_seed),
            "versions": versions,
            "stages": stages,
            "limits": limits,
            "locality": locality,
        }

    @cached_property
    def _balanced(self) -> BalancedIndices:
        return BalancedIndices(self.weights, self.size, self.config.random_seed, self.config.path_to_cache)

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

    def _expected(self) -> Mapping[str, ArraySpec]:
        samples = (self._num_samples,)
        return {
            "dataset_index": ArraySpec(np.dtype(dataset_index_dtype(len(self.datasets))), samples),
            "dataset_sample_index": ArraySpec(np.dtype(np.int64), samples),
        }

    def _build(self, allocate: Allocate) -> Arrays:
        chosen, samples = blend(self.weights, self.size, allocate=allocate)
        self._check_draws(draws_of_each(chosen, samples, num_datasets=len(self.datasets)))
        return dict(zip(ARRAYS, (chosen, samples), strict=True))

    def _check_draws(self, drawn: Sequence[int]) -> None:
        """Refuse a blend that asks a dataset for more samples than it has."""
        for number, (dataset, count) in enumerate(zip(self.datasets, drawn, strict=True)):
            if not dataset.can_give(count):
                msg = (
                    f"{dataset.dataset_path}, split {self.split.name}: the blend may draw at most the "
                    f"{len(dataset)} samples of dataset {number}, found {count}; raise mid_level_dataset_surplus, "
                    f"now {self.config.mid_level_dataset_surplus}"
                )
                raise OversampleError(msg)

    def _request(self) -> Request | None:
        """Returns the request for the indices; None if they are kept in memory."""
        if self.config.order == "balanced":
            return self._balanced.request()
        entry = self._entry()
        if entry is None:
            return None
        return Request(entry, _KIND, self, cost=_DRAW_COST * self._num_samples)

    def _open_indices(self) -> Arrays:
        if self.config.order == "balanced":
            self._check_draws(self._balanced.counts)
        request = self._request()
        if request is not None:
            return open_index(request)
        return self._balanced.build() if self.config.order == "balanced" else self._build(in_memory)

    def _keep(self, arrays: Arrays | None) -> None:
        """Take the indices, each of which is mapped when it is first asked for; or None until a sample is."""
        self._arrays = arrays
        for name in ARRAYS:
            vars(self).pop(name, None)
            if arrays is None:
                vars(self)[name] = None

    def __getstate__(self) -> dict[str, Any]:
        """What a worker process needs: indices that lie in the cache are opened there again."""
        state = vars(self).copy()
        for name in ("_gatherer", "data_checksum"):
            state.pop(name, None)
        if self.config.order != "instant" and self.config.path_to_cache is not None:
            state.update(dict.fromkeys(("_arrays", *ARRAYS)))
        return state

    @property
    def _num_samples(self) -> int:
        return int(sum(self.weights)) if self.size is None else self.size

    def __len__(self) -> int:
        """N, samples in the blend."""
        return self._num_samples

    def locate(self, idx: int) -> tuple[int, int]:
        """Which dataset gives the sample at a position, and where that one has it: what its own `__getitem__` takes.

        Args:
            idx: in `[-N, N)`.

        Raises:
            IndexError: there is no such sample.
        """
        if self.config.order == "instant":
            position = self._checked(idx)
            datasets, samples = self.order.locate([position])  # type: ignore[union-attr]  # there is such a sample
            return int(datasets[0]), StoredSample(samples[0])
        self._open_deferred()
        position = self._checked(idx)
        dataset_id, sample = int(self.dataset_index[position]), int(self.dataset_sample_index[position])
        if not 0 <= dataset_id < len(self.datasets):
            self._refuse(ARRAYS[:1], f"datasets in [0, {len(self.datasets)})", f"{dataset_id} at {position}")
        if not 0 <= sample < len(self.datasets[dataset_id]):
            wanted = f"samples in [0, {len(self.datasets[dataset_id])}) of dataset {dataset_id}"
            self._refuse(ARRAYS, wanted, f"{sample} at {position}")
        return dataset_id, sample

    def _checked(self, idx: int) -> int:
        """The position `idx`, counted from the end where it is below 0."""
        number = as_index(idx)
        position = number + len(self) if number < 0 else number
        if not 0 <= position < len(self):
            msg = f"a sample must be in [-{len(self)}, {len(self)}), found {number}"
            raise IndexError(msg)
        return position

    def _refuse(self, names: Sequence[str], wanted: str, found: str) -> NoReturn:
        raise damage(self._arrays or {}, names, wanted, found)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """One sample: `dataset_id`, then what the dataset's sample holds.

        Raises:
            IndexError: there is no such sample.
            CacheError: an index is damaged.
        """
        dataset_id, sample = self.locate(idx)
        # torch can do little with the uint16 of the order "balanced".
        told = self.dataset_index.dtype.type(dataset_id) if self.config.order == "megatron" else dataset_id
        return {"dataset_id": told, **self.datasets[dataset_id][sample]}

    def _open_deferred(self) -> None:
        """See that the indices are there."""
        if self.config.order != "instant" and self.dataset_index is None:
            request = self._request()
            advice = advice_on_missing(self.config)
            self._keep(self._open_indices() if request is None else find_index(request, advice))

    @cached_property
    def _gatherer(self) -> Gatherer | None:
        members = [one for one in self.datasets if isinstance(one, GPTDataset) and not one.makes_its_samples()]
        if type(self).__getitem__ is not BlendedDataset.__getitem__ or len(members) < len(self.datasets):
            return None
        return Gatherer(members, self._id_type)

    @property
    def _id_type(self) -> torch.dtype:
        """Of the dataset's number in a batch."""
        is_narrow = self.config.order == "megatron" and dataset_index_dtype(len(self.datasets)) is np.int16
        return torch.int16 if is_narrow else torch.int32 if self.config.order == "megatron" else torch.int64

    @cached_property
    def _ahead(self) -> PrefetchedOrder | None:
        """The order "instant", for those who go through it; None where there are no samples."""
        return None if self.order is None else PrefetchedOrder(self.order)

    def _gathered(self) -> Gatherer | None:
        return self._gatherer

    def _draw(self, positions: npt.NDArray[np.int64]) -> Draws:
        if self.config.order == "instant" and self._ahead is not None:
            return self._ahead.locate(positions)
        self._open_deferred()
        try:
            if self.config.order == "instant":
                return np.zeros(0, dtype=np.int32)[positions], positions
            datasets, samples = self.dataset_index[positions], self.dataset_sample_index[positions]
        except IndexError:
            for position in positions.tolist():
                self._checked(position)
            raise
        # A number that is too large is seen by whoever cuts the sample; below 0 it would count from the end.
        if len(positions) and (samples.min() < 0 or datasets.min() < 0):
            for position in positions.tolist():
                self.locate(position)
        return datasets.astype(np.int32), samples.astype(np.int64)


_KIND: Final = OneByOne(BlendedDataset._build, BlendedDataset._expected, is_blend=True)  # noqa: SLF001  its own module


def blend(
    weights: Sequence[float], size: int | None, *, allocate: Allocate = in_memory
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
    """Dataset and sample of each position, where datasets of weight 0 are never drawn.

    Args:
        weights: `[K]` shares if `size` is given, else how many samples each dataset gives.
        size: N, or None for the sum of the weights.
        allocate: gives `dataset_index` and `dataset_sample_index` to be filled.

    >>> datasets, samples = blend([0.0, 0.5, 0.5], 3)
    >>> datasets.tolist(), samples.tolist()
    ([1, 2, 1], [0, 0, 1])
    """

    def look(done: int) -> None:
        if len(drawn) == len(weights):  # else the numbers of datasets are not final yet
            allocate.filled(done, *ARRAYS)

    drawn = [number for number, weight in enumerate(weights) if weight]
    shares = [weights[number] for number in drawn]
    if size is None:
        chosen, samples = exhaustive_blend([int(share) for share in shares], allocate=allocate, poll=look)
    else:
        chosen, samples = greedy_blend(shares, size, allocate=allocate, poll=look)
    if len(drawn) < len(weights):
        numbers: npt.NDArray[np.integer[Any]] = np.array(drawn, dtype=dataset_index_dtype(len(weights)))
        if numbers.dtype != chosen.dtype:
            return numbers[chosen], samples
        for start in range(0, len(chosen), _STRETCH):
            stretch = chosen[start : start + _STRETCH]
            stretch[:] = numbers[stretch]
    return chosen, samples


def draws_of_each(
    datasets: npt.NDArray[np.integer[Any]], samples: npt.NDArray[np.int64], *, num_datasets: int
) -> list[int]:
    """How often each dataset is drawn: one more than its last draw's number, so that only the end is looked at.

    >>> draws_of_each(np.array([0, 1, 0], dtype=np.int16), np.array([0, 0, 1]), num_datasets=3)
    [2, 1, 0]
    """
    draws = np.zeros(num_datasets, dtype=np.int64)
    for stop in range(len(datasets), 0, -_STRETCH):
        start = max(stop - _STRETCH, 0)
        last = np.zeros(num_datasets, dtype=np.int64)
        last[datasets[start:stop]] = samples[start:stop] + 1  # of equal places the last one is kept
        draws = np.maximum(draws, last)
        if start == 0 or int(draws.sum()) == len(datasets):
            break
    return [int(count) for count in draws]


def _check_members(datasets: Sequence[MegatronDataset], weights: Sequence[float], size: int | None) -> None:
    if len(datasets) == 0 or len(datasets) != len(weights):
        msg = f"a blend needs a weight for each of its datasets, found {len(datasets)} and {len(weights)}"
        raise ArgumentError(msg)
    for what, found in (
        ("datasets of one class", {type(dataset).__name__ for dataset in datasets}),
        ("datasets of one split", {dataset.index_split.name for dataset in datasets}),
        ("weights of one type", {type(weight).__name__ for weight in weights}),
    ):
        if len(found) > 1:
            msg = f"a blend needs {what}, found {', '.join(sorted(found))}"
            raise ArgumentError(msg)
    if size is not None and size < 0:
        msg = f"the size of a blend must be at least 0, found {size}"
        raise ArgumentError(msg)
    for number, weight in enumerate(weights):
        if not 0 <= weight < float("inf") or (size is None and weight != int(weight)):
            kind = "a number of samples" if size is None else "a finite number"
            msg = f"the weight of dataset {number} must be {kind} of at least 0, found {weight}"
            raise ArgumentError(msg)
