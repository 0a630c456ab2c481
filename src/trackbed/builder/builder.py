"""The builder: from a configuration to the datasets of training, validation and test.

This module alone determines the processes that take part.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from trackbed.builder.agreement import request_of
from trackbed.builder.coordinator import Coordinator, find_missing
from trackbed.builder.executor import Progress, tasks_of
from trackbed.builder.plan_split import SplitSpec, check_sizes, plan_split
from trackbed.builder.schedule import Plan, Task, plan_tasks
from trackbed.cache import FlushMark, flush_and_mark, make_marks
from trackbed.cancellation import check_cancelled, polling
from trackbed.comm import SOLO, Group
from trackbed.comm.torch_group import current_group
from trackbed.datasets.blend.dataset import BlendedDataset
from trackbed.datasets.cached import CachedDataset, check_overrides, is_ours
from trackbed.datasets.config import BlendedMegatronDatasetConfig, storage_of
from trackbed.datasets.end_check import check_document_ends
from trackbed.datasets.low_level import IndexedDataset
from trackbed.datasets.mask_check import check_masks
from trackbed.datasets.megatron_dataset import MegatronDataset
from trackbed.datasets.start import Start, current_start
from trackbed.errors import CacheError, PlanError, TrackbedError
from trackbed.files import local_host_path
from trackbed.index.legacy_random import clear_shuffle_cache
from trackbed.index.ranges import number_range
from trackbed.index.splits import Split, split_range
from trackbed.plural import number_of
from trackbed.tokens.format import PairHeader


def constructs_in_turn(cls: type[MegatronDataset]) -> bool:
    """True for a class that may write files when it is constructed.

    By Megatron Core's convention such a class writes them on rank 0, which is constructed first, and reads them on the
    others.
    """
    if issubclass(cls, CachedDataset):
        return cls.builds_its_indices() or not is_ours(cls.__init__)
    return not is_ours(cls)


def constructor_of_ours(cls: type[MegatronDataset]) -> Callable[..., MegatronDataset] | None:
    """Constructs a dataset of a class with the constructor of its nearest base class of ours, which writes no files.

    The dataset requests the indices that the class has in the cache. None for a class that has none there, or builds
    them itself.
    """
    if not issubclass(cls, CachedDataset) or cls.builds_its_indices():
        return None
    base: Any = next(base for base in cls.__mro__ if is_ours(base) and "__init__" in vars(base))

    def construct(*arguments: Any) -> MegatronDataset:
        dataset = cls.__new__(cls)
        base.__init__(dataset, *arguments)
        return dataset

    return construct


_NEVER_CALLED = (
    "_build_blended_dataset_splits",
    "_build_megatron_dataset_splits",
    "_build_megatron_datasets_parallel",
    "build_generic_dataset",
)
_NOT_FAST = "fast_cache_load needs every index to be there: build this cache without it first"

logger = logging.getLogger(__name__)

_Make = Callable[..., Any]
"""Constructs a dataset: its class, or a function with the same arguments."""
_Members = list[list[Any]]
"""For each low-level dataset, the dataset of each split."""
_Settle = Callable[[Sequence[Any]], None]
"""Called with the datasets that were made."""


TopLevelDataset: TypeAlias = BlendedDataset | MegatronDataset
"""A dataset that a builder returns, under Megatron Core's name."""
DistributedDataset: TypeAlias = TopLevelDataset | IndexedDataset | Iterable | torch.utils.data.Dataset  # type: ignore[type-arg]  # for isinstance
"""Anything that `build_generic_dataset` may construct, under Megatron Core's name."""

_Dataset = TypeVar("_Dataset", bound=MegatronDataset)

BuiltSplit: TypeAlias = _Dataset | BlendedDataset | list[_Dataset | BlendedDataset] | None
"""Result for one split: a dataset of the class, or a blend of several; a list with `multiple_validation_sets`."""


class _Opened(NamedTuple):
    """A low-level dataset."""

    prefix: str | None
    dataset: Any
    num_elements: int


class _LengthsUnknown(Exception):  # noqa: N818  it is caught in this module
    """A blend cannot be planned before its datasets are built."""


def build_generic_dataset(
    cls: Callable[..., Any],
    is_built_on_rank: Callable[[], bool],
    synchronize_ranks: bool,
    *args: Any,
) -> Any | None:
    """`cls(*args)`, or None on a rank that does not want it.

    Args:
        cls: a dataset class, or anything that makes one.
        is_built_on_rank: whether this process wants it; asked only under `torch.distributed`.
        synchronize_ranks: True to call `cls` on rank 0 first, which may write files, and on the others once it has
            returned: this is collective over the ranks. False to wait for no other rank.
        *args: what `cls` is called with.

    Raises:
        CacheError: under `torch.distributed`, `cls` raised an OSError on rank 0, which may have failed to write.
        CollectiveError: with `synchronize_ranks` among several ranks, `cls` failed on one of them.
    """
    group = current_group()
    if group is None:
        return cls(*args)
    make = partial(_construct_first, cls) if group.rank == 0 else cls
    if not synchronize_ranks or group.size == 1:
        return make(*args) if is_built_on_rank() else None
    with group.guarded("building a dataset") as step, polling(step.poll):
        wants, is_first = is_built_on_rank(), group.rank == 0
        built = make(*args) if wants and is_first else None
        group.barrier()
        return make(*args) if wants and not is_first else built


def _construct_first(cls: Callable[..., Any], *args: Any) -> Any:
    """`cls(*args)` on the rank that writes its files."""
    try:
        return cls(*args)
    except OSError as error:
        raise CacheError(
            "Failed to write dataset materials: the constructor must be able to write and read its files, but raised "
            f"{type(error).__name__}: {error}; set path_to_cache of the configuration to a folder that can be written"
        ) from error


class BlendedMegatronDatasetBuilder(Generic[_Dataset]):
    """Builds the datasets of all three splits.

    Args:
        cls: class of the datasets that are blended.
        sizes: samples to give at least per split, or None for one epoch.
        is_built_on_rank: whether this process wants the datasets; asked only among several processes.
        config: configuration of the datasets.
        group: the processes; by default those of `torch.distributed`.
        progress: called after each index that this process has built.
        headers: headers of pairs in object stores that were read already, as `MeasuredBlend` has them.

    Raises:
        ArgumentError: the sizes contradict the configuration.
    """

    def __init__(
        self,
        cls: type[_Dataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
        *,
        group: Group | None = None,
        progress: Progress | None = None,
        headers: Mapping[str, PairHeader] | None = None,
    ) -> None:
        check_overrides(type(self), *_NEVER_CALLED, advice="override build, or the methods of the dataset class")
        check_sizes(sizes, config)
        self.cls = cls
        self.sizes = [None if size is None else index(size) for size in sizes]
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self._group = group
        self._progress = progress
        self._headers = headers

    build_generic_dataset = staticmethod(build_generic_dataset)

    def plan(self, num_ranks: int) -> tuple[list[Task], Plan]:
        """Plans the indices that `build` would build, and divides them among ranks of equal speed. Nothing is written.

        A blend that takes whole datasets, whose lengths are not known before they are built, is not in the plan.

        Args:
            num_ranks: at least 1.

        Returns:
            The indices that are missing, with the nanoseconds that one thread takes for each, roughly; and the plan.

        Raises:
            The same errors as `build`, as far as they occur without building.
        """
        start = Start(leave_notes=False, headers=self._headers)
        with start.active(), contextlib.suppress(_LengthsUnknown):

            def settle(_built: Sequence[Any]) -> None:
                if find_missing(start.requested, leave_notes=False):
                    raise _LengthsUnknown

            self._build(settle)
        missing = find_missing(start.requested, leave_notes=False)
        tasks = tasks_of([start.requested[number] for number in missing])
        return tasks, plan_tasks(tasks, num_ranks)

    def build(self) -> list[BuiltSplit[_Dataset]]:
        """The dataset of each split: a `BlendedDataset`, a dataset of class `cls`, or None.

        Collective over the group, unless `fast_cache_load`. Indices that are not in the cache are built by all ranks
        that want datasets, each a fair part; if a rank fails, every rank raises an error that names it and the cause.
        Indices are mapped when they are first read. Rank 0 logs a warning if options need the ends of documents and
        the first documents do not end with the tokenizer's end-of-document token.

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
        if group is None or group.rank == 0:
            check_document_ends(self.config)
            check_masks(self.config)
        wants = self.is_built_on_rank if group is not None else lambda: True
        if self.config.fast_cache_load:
            with Start(open_only=_NOT_FAST, headers=self._headers).active():
                return self._build() if wants() else [None] * len(Split)
        # A single process waits for no other, and its errors propagate unchanged.
        return self._build_with(SOLO if group is None or group.size == 1 else group, wants)

    def _build_with(self, group: Group, asked: Callable[[], bool]) -> list[BuiltSplit[_Dataset]]:
        start = Start(headers=self._headers)
        with group.guarded("building the indices") as step, polling(step.poll):
            path = self.config.path_to_cache
            coordinator = Coordinator(
                group,
                num_threads=self.config.num_dataset_builder_threads,
                cache="" if group is SOLO or path is None else local_host_path(path),
                progress=self._progress,
            )
            if not asked():
                if group.size > 1 and constructs_in_turn(self.cls):
                    self._attend_construction(coordinator)
                coordinator.attend()
                return [None] * len(Split)
            with start.active():

                def settle(built: Sequence[Any], *, is_last: bool = False) -> None:
                    request = partial(request_of, built, self.cls, self.sizes, self.config)
                    coordinator.settle(start.requested, request, is_last=is_last)

                is_in_turn = group.size > 1 and constructs_in_turn(self.cls)
                built = self._build(settle, coordinator if is_in_turn else None)
                settle(built, is_last=True)
                clear_shuffle_cache()
                for dataset in built:
                    _check_length(dataset)
            marks = _make_marks(start)
        flush_and_mark(marks)  # last: its thread would slow down what follows
        return built

    def _build(
        self, settle: _Settle = lambda _built: None, coordinator: Coordinator | None = None
    ) -> list[BuiltSplit[_Dataset]]:
        """Builds the datasets, whose indices may still be pending.

        Args:
            settle: finds or builds the indices so far requested, where a blend needs the lengths of its datasets.
            coordinator: given where ranks construct datasets in turn.
        """
        specs = [plan_split(split, self.sizes[split.value], self.config) for split in Split]
        # Splits of the same low-level datasets are built together.
        is_shared = self.config.blend is not None or self.config.mock
        together = [specs] if is_shared else [[spec] for spec in specs]
        try:
            opened = [self._open(part) for part in together]

            def construct(make: _Make) -> list[_Members]:
                return [self._construct(make, *pair) for pair in zip(together, opened, strict=True)]

            members = construct(self.cls) if coordinator is None else self._construct_in_turn(construct, coordinator)
            pairs = zip(together, members, strict=True)
            return [dataset for part, datasets in pairs for dataset in self._blend_splits(part, datasets, settle)]
        except TrackbedError as error:
            if not self.config.mock:
                raise
            raise PlanError(f"{self.cls.__name__} failed to build as a mock data generator: {error}") from error

    def _blend_splits(
        self, specs: Sequence[SplitSpec | None], members: _Members, settle: _Settle
    ) -> list[BuiltSplit[_Dataset]]:
        """Blends the datasets of splits."""
        if any(spec is not None and spec.is_blended and spec.weights is None for spec in specs):
            settle(members)
        return [
            None if spec is None else self._blend(spec, [member[number] for member in members])
            for number, spec in enumerate(specs)
        ]

    def _open(self, specs: Sequence[SplitSpec | None]) -> list[_Opened]:
        """Opens the low-level datasets of splits that share them."""
        prefixes = next((spec.prefixes for spec in specs if spec is not None), ())
        if is_ours(self.cls.build_low_level_dataset):  # others open their own files
            groups = getattr(self.config, "groups", None) or {}
            start = current_start()
            if start is not None:
                storage = storage_of(self.config)
                start.read_headers(
                    (prefix for prefix in prefixes if prefix is not None and prefix not in groups),
                    idx_cache=None if storage is None else storage.path_to_idx_cache,
                )
        opened = []
        for prefix in prefixes:
            check_cancelled()  # there may be thousands, on a slow file system
            low_level = self.cls.build_low_level_dataset(prefix, self.config)  # type: ignore[arg-type]
            opened.append(_Opened(prefix, low_level, self.cls.numel_low_level_dataset(low_level)))
        return opened

    def _construct(self, make: _Make, specs: Sequence[SplitSpec | None], opened: Sequence[_Opened]) -> _Members:
        """Constructs, for each low-level dataset, the dataset of each split."""
        members = []
        for number, (prefix, low_level, num_elements) in enumerate(opened):
            check_cancelled()
            datasets: list[Any] = []
            for spec in specs:
                if spec is None:
                    datasets.append(None)
                    continue
                documents = number_range(*split_range(spec.bounds, num_elements))
                size = spec.requested[number]
                datasets.append(make(low_level, prefix, documents, size, spec.split, self.config))
            members.append(datasets)
        return members

    def _construct_in_turn(
        self, construct: Callable[[_Make], list[_Members]], coordinator: Coordinator
    ) -> list[_Members]:
        """Collective over the group: builds the indices of the cache, and constructs the datasets in turn.

        Args:
            construct: constructs all datasets.
            coordinator: the ranks.
        """
        make = constructor_of_ours(self.cls)
        if make is not None:
            start = Start(leave_notes=False)
            with start.active():
                try:
                    construct(make)
                except Exception as error:  # noqa: BLE001  its own constructor says what is wrong, if anything is
                    logger.debug("%s: indices are built when it is constructed: %s", self.cls.__name__, error)
                    start.requested.clear()
                coordinator.settle(start.requested, is_last=False)
            flush_and_mark(_make_marks(start))
        made = coordinator.take_turns(lambda: construct(self.cls))
        return [] if made is None else made

    def _attend_construction(self, coordinator: Coordinator) -> None:
        """Collective over the group: `_construct_in_turn` for a rank that wants no datasets."""
        if constructor_of_ours(self.cls) is not None:
            coordinator.attend_once()
        coordinator.take_turns(None)

    def _blend(self, spec: SplitSpec, datasets: list[Any]) -> Any:
        """Blends the datasets of a split, unless they are used as they are."""
        if not spec.is_blended:
            is_apart = spec.split is Split.valid and self.config.multiple_validation_sets
            return datasets if is_apart and len(datasets) > 1 else datasets[0]
        if spec.weights is not None:
            return BlendedDataset(datasets, spec.weights, spec.size, self.config)
        lengths = [len(dataset) for dataset in datasets]
        if spec.size and not sum(lengths):
            datasets_text = number_of(len(lengths), "dataset")
            raise PlanError(
                f"split {spec.split.name} must have samples to give {spec.size:,}, found none in its {datasets_text}"
            )
        size = None if spec.size is None else min(spec.size, sum(lengths))
        return BlendedDataset(datasets, lengths, size, self.config)


def _make_marks(start: Start) -> list[FlushMark]:
    """Makes the files that will state that the indices which this rank has built are on the disk."""
    found = ((one.entry.own_folder, one.found) for one in start.requested)
    return make_marks((own, made.stamps) for own, made in found if made is not None and made.is_built)


def _check_length(dataset: Any) -> None:
    """Raises PlanError for a dataset that rounding in single precision left short, instead of a failure in mid-run."""
    wanted = dataset.num_samples if isinstance(dataset, MegatronDataset) else None
    if wanted is not None and not dataset.can_give(wanted) and len(dataset) > 0:
        raise PlanError(
            f"{dataset.dataset_path}, split {dataset.index_split.name}: at least "
            f"{number_of(wanted, 'sample')} must come out, found {len(dataset):,}"
        )
