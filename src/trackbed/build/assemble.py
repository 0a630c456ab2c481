"""The builder: from a configuration to the datasets of training, validation and test.

The one place that asks which processes there are.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import Any

from trackbed.build.sizes import Shares, blend_of, check_sizes, plan_shares
from trackbed.cache import Access, access
from trackbed.comm import SOLO, Group
from trackbed.comm.torch import current_group
from trackbed.datasets.balanced import BalancedIndices
from trackbed.datasets.blended import BlendedDataset
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.megatron import MegatronDataset
from trackbed.errors import ArgumentError, PlanError, TrackbedError
from trackbed.index.runs import run
from trackbed.index.splits import Bounds, Split, normalize, split_range

__all__ = ["BlendedMegatronDatasetBuilder", "build_generic_dataset"]

_NOT_DISTRIBUTED = "not yet distributed: build this cache in one process first"
_NOT_FAST = "fast_cache_load needs every index to be there: build this cache without it first"

Matrix = Sequence[Bounds | None]
Sizes = Sequence[int | None]


class BlendedMegatronDatasetBuilder:
    """Builds the datasets of all three splits.

    Args:
        cls: class of the datasets that are blended.
        sizes: samples to give at least per split, or None for one epoch.
        is_built_on_rank: whether this process wants the datasets; asked only among several processes.
        config: what decides the samples.
        group: the processes; by default those of `torch.distributed`.

    Raises:
        ArgumentError: sizes that the configuration cannot mean.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sizes,
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
        *,
        group: Group | None = None,
    ) -> None:
        check_sizes(sizes, config)
        self.cls = cls
        self.sizes = sizes
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self._group = group

    def build(self) -> list[Any]:
        """The dataset of each split: a `BlendedDataset`, a dataset of class `cls`, or None.

        Called on all ranks. In one process, indices that are not in the cache are built. Among several, each
        opens a complete cache by itself.

        Returns:
            Three datasets. None for a split without data, and for all on a rank that does not want them. With
            `multiple_validation_sets`, a list of datasets for validation.

        Raises:
            PlanError: the data cannot give the samples asked for.
            CacheError: an index cannot be read, built or written.
            FormatError: a token file is damaged.
        """
        group = self._group or current_group()
        if group is not None and not self.is_built_on_rank():
            return [None] * len(Split)
        with _access(group or SOLO, fast_cache_load=self.config.fast_cache_load):
            if self.config.mock:
                built = self._build_mock()
            elif self.config.blend is not None:
                built = self._build_shared(*self.config.blend)
            else:
                built = [self._build_separate(split) for split in Split]
        for dataset in built:
            _check_length(dataset)
        return built

    def _build_mock(self) -> list[Any]:
        try:
            return self._build_members([None], self._matrix, [self.sizes])[0]
        except (TrackbedError, ArgumentError) as error:
            msg = f"{self.cls.__name__} failed to build as a mock data generator: {error}"
            raise PlanError(msg) from error

    def _build_shared(self, prefixes: Sequence[str], weights: Sequence[float] | None) -> list[Any]:
        """All splits from one blend."""
        if len(prefixes) == 1 and weights is None:
            return self._build_members(prefixes, self._matrix, [self.sizes])[0]
        sizes = [None if bounds is None else size for bounds, size in zip(self._matrix, self.sizes, strict=True)]
        return self._build_blends(prefixes, weights, self._matrix, sizes)

    def _build_separate(self, split: Split) -> Any:
        """One split from a blend of its own."""
        blend = blend_of(split, self.config)
        if blend is None:
            return None
        prefixes, weights = blend
        matrix = [(0.0, 1.0) if other is split else None for other in Split]
        sizes = [self.sizes[split.value] if other is split else None for other in Split]
        if len(prefixes) == 1:
            return self._build_members(prefixes, matrix, [sizes])[0][split.value]
        if split is Split.valid and self.config.multiple_validation_sets:
            return [member[split.value] for member in self._build_members(prefixes, matrix, [sizes] * len(prefixes))]
        return self._build_blends(prefixes, weights, matrix, sizes)[split.value]

    def _build_blends(
        self, prefixes: Sequence[str], weights: Sequence[float] | None, matrix: Matrix, sizes: Sizes
    ) -> list[Any]:
        """A blend per split whose bounds are given."""
        shares = None
        wanted: list[Sizes] = [[None] * len(Split)] * len(prefixes)
        if weights is not None:
            normalized = normalize(weights)
            shares = [None if size is None else plan_shares(normalized, size, self.config) for size in sizes]
            wanted = [
                [None if share is None else share.per_dataset[member] for share in shares]
                for member in range(len(prefixes))
            ]
        with self._blends_ahead([share for share in shares or [] if share is not None]):
            members = self._build_members(prefixes, matrix, wanted)
        blends: list[Any] = []
        for split, bounds in zip(Split, matrix, strict=True):
            datasets = [member[split.value] for member in members]
            if bounds is None:
                blends.append(None)
                continue
            share = shares[split.value] if shares else None
            if share is not None:
                blends.append(BlendedDataset(datasets, share.weights, share.size, self.config))
                continue
            lengths = [len(dataset) for dataset in datasets]
            size = sizes[split.value]
            if size and not sum(lengths):
                msg = f"split {split.name} must have samples to give {size}, found none in its {len(lengths)} datasets"
                raise PlanError(msg)
            size = None if size is None else min(size, sum(lengths))
            blends.append(BlendedDataset(datasets, lengths, size, self.config))
        return blends

    @contextlib.contextmanager
    def _blends_ahead(self, shares: Sequence[Shares]) -> Iterator[None]:
        """In the order "balanced", build the indices of the blends meanwhile: they need no dataset, only their size.

        They go to the cache, where the blends find them. What goes wrong with them is an error at the block's end, and
        an error in the block ends them.
        """
        config = self.config
        if config.order != "balanced" or config.path_to_cache is None or config.defer_npy_index_mmap:
            yield
            return
        stopped = Event()

        def look(_done: int) -> None:
            if stopped.is_set():
                raise CancelledError

        with ThreadPoolExecutor(1, thread_name_prefix="trackbed-blend") as pool:
            seed, directory = self.config.random_seed, self.config.path_to_cache
            indices = [BalancedIndices(normalize(share.weights), share.size, seed, directory) for share in shares]
            futures = [pool.submit(copy_context().run, partial(each.open, poll=look)) for each in indices]
            try:
                yield
                for future in futures:
                    future.result()
            finally:
                stopped.set()
                for future in futures:
                    future.cancel()

    def _build_members(self, prefixes: Sequence[str | None], matrix: Matrix, sizes: Sequence[Sizes]) -> list[list[Any]]:
        """For each prefix, a dataset per split whose bounds are given."""
        threads = min(self.config.num_dataset_builder_threads, len(prefixes))
        if threads == 1:
            return [self._build_splits(prefix, matrix, wanted) for prefix, wanted in zip(prefixes, sizes, strict=True)]
        with ThreadPoolExecutor(threads) as pool:
            futures = [
                pool.submit(copy_context().run, self._build_splits, prefix, matrix, wanted)
                for prefix, wanted in zip(prefixes, sizes, strict=True)
            ]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _build_splits(self, prefix: str | None, matrix: Matrix, sizes: Sizes) -> list[Any]:
        low_level = self.cls.build_low_level_dataset(prefix, self.config)  # type: ignore[arg-type]
        num_elements = self.cls.numel_low_level_dataset(low_level)
        datasets: list[Any] = []
        for split, bounds, size in zip(Split, matrix, sizes, strict=True):
            if bounds is None:
                datasets.append(None)
                continue
            start, stop = split_range(bounds, num_elements)
            datasets.append(self.cls(low_level, prefix, run(start, stop), size, split, self.config))
        return datasets

    @property
    def _matrix(self) -> Matrix:
        return self.config.split_matrix or [None] * len(Split)

    @staticmethod
    def build_generic_dataset(
        cls: Callable[..., Any],  # noqa: PLW0211  Megatron Core's signature
        is_built_on_rank: Callable[[], bool],
        synchronize_ranks: bool,  # noqa: FBT001  Megatron Core's signature
        *args: Any,
    ) -> Any | None:
        """`cls(*args)`, or None on a rank that does not want it. See `build_generic_dataset`."""
        return build_generic_dataset(cls, is_built_on_rank, synchronize_ranks, *args)


def build_generic_dataset(
    cls: Callable[..., Any],
    is_built_on_rank: Callable[[], bool],
    synchronize_ranks: bool,  # noqa: FBT001, ARG001  Megatron Core's signature
    *args: Any,
) -> Any | None:
    """`cls(*args)`, or None on a rank that does not want it.

    Args:
        cls: a dataset class, or anything that makes one.
        is_built_on_rank: whether this process wants it; asked only under `torch.distributed`.
        synchronize_ranks: of no effect, as no rank waits for another.
        *args: what `cls` is called with.

    Raises:
        CacheError: among several processes, an index is not in the cache.
    """
    group = current_group()
    if group is not None and not is_built_on_rank():
        return None
    with _access(group or SOLO, fast_cache_load=False):
        return cls(*args)


def _access(group: Group, *, fast_cache_load: bool) -> contextlib.AbstractContextManager[None]:
    if group.size > 1:
        return access(Access.open_only, advice=_NOT_DISTRIBUTED)
    if fast_cache_load:
        return access(Access.open_only, advice=_NOT_FAST)
    return contextlib.nullcontext()


def _check_length(dataset: Any) -> None:
    """Rounding in single precision may leave a dataset short: better here than in the middle of a run."""
    if isinstance(dataset, MegatronDataset) and dataset.num_samples is not None:
        have = len(dataset)
        if 0 < have < dataset.num_samples:
            msg = (
                f"{dataset.dataset_path}, split {dataset.index_split.name}: at least {dataset.num_samples} "
                f"samples must come out, found {have}"
            )
            raise PlanError(msg)
