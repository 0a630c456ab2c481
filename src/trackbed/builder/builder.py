"""The builder: from a configuration to the datasets of training, validation and test.

The one place that asks which processes there are.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any

from trackbed.builder.agreement import request_of
from trackbed.builder.coordinator import Coordinator
from trackbed.builder.executor import Progress, tasks_of
from trackbed.builder.schedule import Plan, Task, plan_tasks
from trackbed.builder.sizes import blend_of, check_sizes, plan_shares
from trackbed.cache import LazyArrays, flush_later, look_up
from trackbed.cancellation import check_cancelled, polling
from trackbed.comm import SOLO, Group
from trackbed.comm.torch import current_group
from trackbed.datasets.blended import BlendedDataset
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.gpt import GPTDataset
from trackbed.datasets.megatron import MegatronDataset
from trackbed.datasets.start import Start, current_start
from trackbed.errors import ArgumentError, PlanError, TrackbedError
from trackbed.files import Stamps, local_host_path
from trackbed.index.legacy_random import clear_shuffle_cache
from trackbed.index.ranges import number_range
from trackbed.index.splits import Bounds, Split, normalize, split_range

__all__ = ["BlendedMegatronDatasetBuilder", "build_generic_dataset"]

_NOT_FAST = "fast_cache_load needs every index to be there: build this cache without it first"

Matrix = Sequence[Bounds | None]
Sizes = Sequence[int | None]
_Settle = Callable[[Sequence[Any]], None]
"""Called with the datasets that were made."""


class _LengthsUnknown(Exception):  # noqa: N818  it is caught in this module
    """A blend cannot be planned before its datasets are built."""


class BlendedMegatronDatasetBuilder:
    """Builds the datasets of all three splits.

    Args:
        cls: class of the datasets that are blended.
        sizes: samples to give at least per split, or None for one epoch.
        is_built_on_rank: whether this process wants the datasets; asked only among several processes.
        config: what decides the samples.
        group: the processes; by default those of `torch.distributed`.
        progress: told of each index that this process has built.

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
        progress: Progress | None = None,
    ) -> None:
        check_sizes(sizes, config)
        self.cls = cls
        self.sizes = [None if size is None else index(size) for size in sizes]
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self._group = group
        self._progress = progress

    def plan(self, num_ranks: int) -> tuple[list[Task], Plan]:
        """What `build` would build, and who of so many ranks would, if all are equally fast. Nothing is written.

        A blend that takes whole datasets, whose lengths are not known before they are built, is not in the plan.

        Args:
            num_ranks: at least 1.

        Returns:
            The indices that are missing, with the nanoseconds that one thread takes for each, roughly; and the plan.

        Raises:
            The same as `build`, as far as it is seen without building.
        """
        start = Start(leave_notes=False)
        with start.active(), contextlib.suppress(_LengthsUnknown):

            def settle(_built: Sequence[Any]) -> None:
                if _find_missing(start.requested):
                    raise _LengthsUnknown

            self._build(settle)
        tasks = tasks_of(_find_missing(start.requested))
        return tasks, plan_tasks(tasks, num_ranks)

    def build(self) -> list[Any]:
        """The dataset of each split: a `BlendedDataset`, a dataset of class `cls`, or None.

        Collective over the group, unless `fast_cache_load`. Indices that are not in the cache are built by all ranks
        that want datasets, each a fair part; if a rank fails, every rank raises an error that names it and the cause.
        Indices are mapped when they are first read.

        Returns:
            Three datasets. None for a split without data, and for all on a rank that does not want them. With
            `multiple_validation_sets`, a list of datasets for validation.

        Raises:
            PlanError: the data cannot give the samples asked for.
            CacheError: an index cannot be read, built or written.
            FormatError: a token file is damaged.
            CollectiveError: among several ranks, one of them failed, or they ask for different datasets.
        """
        group = self._group or current_group()
        wants = self.is_built_on_rank if group is not None else lambda: True
        if self.config.fast_cache_load:
            with Start(open_only=_NOT_FAST).active():
                return self._build() if wants() else [None] * len(Split)
        # One process alone has nobody to wait for, nor to report its errors to.
        return self._build_with(SOLO if group is None or group.size == 1 else group, wants)

    def _build_with(self, group: Group, asked: Callable[[], bool]) -> list[Any]:
        start = Start()
        with group.guarded("building the indices") as step, polling(step.poll):
            wants = asked()
            path = self.config.path_to_cache
            coordinator = Coordinator(
                group,
                wants=wants,
                num_threads=self.config.num_dataset_builder_threads,
                cache="" if group is SOLO or path is None else local_host_path(path),
                progress=self._progress,
            )
            if not wants:
                coordinator.attend()
                return [None] * len(Split)
            with start.active():

                def settle(built: Sequence[Any], *, is_last: bool = False) -> None:
                    request = partial(request_of, built, self.cls, self.sizes, self.config)
                    coordinator.settle(start.requested, request, is_last=is_last)

                built = self._build(settle)
                settle(built, is_last=True)
                clear_shuffle_cache()
                for dataset in built:
                    _check_length(dataset)
        _flush_built(start.requested)  # last: its thread would slow down what follows
        return built

    def _build(self, settle: "_Settle" = lambda _built: None) -> list[Any]:
        """The datasets, whose indices may still be pending.

        Args:
            settle: gets the indices so far opened or built, where a blend has to know how long its datasets are.
        """
        if self.config.mock:
            return self._build_mock()
        if self.config.blend is not None:
            return self._build_shared(*self.config.blend, settle)
        return [self._build_separate(split, settle) for split in Split]

    def _build_mock(self) -> list[Any]:
        try:
            return self._build_members([None], self._matrix, [self.sizes])[0]
        except (TrackbedError, ArgumentError) as error:
            msg = f"{self.cls.__name__} failed to build as a mock data generator: {error}"
            raise PlanError(msg) from error

    def _build_shared(self, prefixes: Sequence[str], weights: Sequence[float] | None, settle: "_Settle") -> list[Any]:
        """All splits from one blend."""
        if len(prefixes) == 1 and weights is None:
            return self._build_members(prefixes, self._matrix, [self.sizes])[0]
        sizes = [None if bounds is None else size for bounds, size in zip(self._matrix, self.sizes, strict=True)]
        return self._build_blends(prefixes, weights, self._matrix, sizes, settle)

    def _build_separate(self, split: Split, settle: "_Settle") -> Any:
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
        return self._build_blends(prefixes, weights, matrix, sizes, settle)[split.value]

    def _build_blends(
        self,
        prefixes: Sequence[str],
        weights: Sequence[float] | None,
        matrix: Matrix,
        sizes: Sizes,
        settle: "_Settle",
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
        members = self._build_members(prefixes, matrix, wanted)
        if shares is None:
            settle(members)
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

    def _build_members(self, prefixes: Sequence[str | None], matrix: Matrix, sizes: Sequence[Sizes]) -> list[list[Any]]:
        """For each prefix, a dataset per split whose bounds are given."""
        if self.cls.build_low_level_dataset is GPTDataset.build_low_level_dataset:  # else it opens who knows what
            groups = getattr(self.config, "groups", None) or {}
            start = current_start()
            if start is not None:
                start.read_headers(prefix for prefix in prefixes if prefix is not None and prefix not in groups)
        return [self._build_splits(prefix, matrix, wanted) for prefix, wanted in zip(prefixes, sizes, strict=True)]

    def _build_splits(self, prefix: str | None, matrix: Matrix, sizes: Sizes) -> list[Any]:
        check_cancelled()  # there may be thousands, on a slow file system
        low_level = self.cls.build_low_level_dataset(prefix, self.config)  # type: ignore[arg-type]
        num_elements = self.cls.numel_low_level_dataset(low_level)
        datasets: list[Any] = []
        for split, bounds, size in zip(Split, matrix, sizes, strict=True):
            if bounds is None:
                datasets.append(None)
                continue
            start, stop = split_range(bounds, num_elements)
            datasets.append(self.cls(low_level, prefix, number_range(start, stop), size, split, self.config))
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
    """
    group = current_group()
    if group is not None and not is_built_on_rank():
        return None
    return cls(*args)


def _find_missing(requested: Sequence[LazyArrays]) -> list[LazyArrays]:
    """Looks up indices without leaving notes. Returns those that are missing."""
    unknown = [one for one in requested if not one.is_resolved]
    requests = [one.request for one in unknown if one.request is not None]
    for one, found in zip(unknown, look_up(requests, leave_notes=False), strict=True):
        one.note(found)
    return [one for one in unknown if not one.is_resolved]


def _flush_built(requested: Sequence[LazyArrays]) -> None:
    """Flushes in the background what this process has built, and then notes that it is on the disk."""
    stamps: defaultdict[str, list[Stamps]] = defaultdict(list)
    for one in requested:
        found = one.last_found
        if found is not None and found.is_built and found.stamps is not None:
            stamps[one.entry.own].append(found.stamps)
    flush_later(stamps)


def _check_length(dataset: Any) -> None:
    """Rounding in single precision may leave a dataset short: better here than in the middle of a run."""
    wanted = dataset.num_samples if isinstance(dataset, MegatronDataset) else None
    if wanted is not None and not dataset.can_give(wanted) and len(dataset) > 0:
        msg = (
            f"{dataset.dataset_path}, split {dataset.index_split.name}: at least {wanted} "
            f"samples must come out, found {len(dataset)}"
        )
        raise PlanError(msg)
