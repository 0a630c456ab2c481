"""The names of `trackbed` itself: datasets of a blend, and loaders that know their rank."""

import os
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trackbed.builder import BlendedMegatronDatasetBuilder, measure_blend, plan_blend, read_blend_file
from trackbed.builder.blend_file import MeasuredBlend, read_blend_table, with_tokenizer
from trackbed.cancellation import polling
from trackbed.comm import SOLO, Group
from trackbed.comm.launch import group_from_environment, parse_launch, threads_per_rank
from trackbed.comm.torch import current_group
from trackbed.datasets import BlendedDataset, GPTDataset
from trackbed.datasets.batches.reader import Gathering
from trackbed.datasets.config import OrderName
from trackbed.datasets.tokenizers.kinds import AnyTokenizer
from trackbed.errors import ArgumentError
from trackbed.kernels.integers import check_at_least, is_integer
from trackbed.loading import BatchLoader as _BatchLoader
from trackbed.loading import MegatronPretrainingSampler
from trackbed.plural import number_of

__all__ = ["BatchLoader", "SplitDataset", "Splits", "open_blend"]

SplitDataset = GPTDataset | BlendedDataset
"""Dataset of a split: of one pair, or a blend."""
_WHERE = "trackbed.open_blend"


class MissingSplitError(ArgumentError, AttributeError):
    """A blend has none, or several, of the dataset that is asked for. `hasattr` is False."""


class Splits:
    """Datasets of training, validation and test.

    Args:
        name: name of the blend, for errors.
        built: the three datasets; None in the place of a dataset that the blend does not have, and for validation also
            a list of datasets.
    """

    def __init__(self, name: str, built: Sequence[SplitDataset | list[SplitDataset] | None]) -> None:
        self._name = name
        self._found = dict(zip(("train", "valid", "test"), built, strict=True))

    @property
    def train(self) -> SplitDataset:
        """Dataset of training.

        Raises:
            ArgumentError: the blend has none.
        """
        return self._one("train")

    @property
    def valid(self) -> SplitDataset:
        """Dataset of validation.

        Raises:
            ArgumentError: the blend has none, or `multiple_validation_sets`.
        """
        return self._one("valid")

    @property
    def test(self) -> SplitDataset:
        """Dataset of test.

        Raises:
            ArgumentError: the blend has none.
        """
        return self._one("test")

    @property
    def validation_sets(self) -> list[SplitDataset]:
        """Datasets of validation: several with `multiple_validation_sets`, else at most one."""
        found = self._found["valid"]
        if isinstance(found, list):
            return found
        return [] if found is None else [found]

    def _one(self, split: str) -> SplitDataset:
        found = self._found[split]
        if isinstance(found, list):
            msg = f"{self._name}: split {split!r} has several datasets, which validation_sets lists"
            raise MissingSplitError(msg)
        if found is None:
            known = ", ".join(repr(name) for name, one in self._found.items() if one is not None)
            msg = f"{self._name}: the blend must have a split {split!r}, found {known}; its shares are set by split"
            raise MissingSplitError(msg)
        return found

    if not TYPE_CHECKING:  # type checkers would take every name for one that there is

        def __getattr__(self, name: str) -> SplitDataset:
            """Raises the error of a split that is missing, or of a name that there is not."""
            if name in ("train", "valid", "test"):
                return self._one(name)
            meant = next((split for split in ("train", "valid", "test") if name[:3] == split[:3]), None)
            hint = "" if meant is None else f"; did you mean {meant!r}?"
            msg = f"splits have train, valid, test and validation_sets, found {name!r}{hint}"
            raise AttributeError(msg)

    def __repr__(self) -> str:
        """Lists the datasets."""
        lines = [f"  {name}: {found!r}" for name, found in self._found.items() if found is not None]
        return "\n".join([f"Splits of {self._name}", *lines])


def open_blend(
    path: str | os.PathLike[str] | None = None,
    *,
    prefixes: Mapping[str, float] | Sequence[str] | None = None,
    sequence_length: int | None = None,
    split: str | None = None,
    size: int | Mapping[str, int | str] | None = None,
    tokenizer: "str | os.PathLike[str] | Mapping[str, Any] | AnyTokenizer | None" = None,
    cache: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    order: OrderName | None = None,
    timeout_seconds: float | None = None,
) -> Splits:
    """Opens the datasets of a blend, and builds indices that are missing.

    Collective over the ranks of `torch.distributed` if it is initialised, else over those that a launcher has started
    (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or Slurm's variables): each rank builds a part of the indices, and
    if a rank fails, all ranks raise an error that names it.

    Args:
        path: a blend file (docs/formats/blend-file.md). None if the arguments from `prefixes` to `order` describe the
            blend. Beside a blend file, only `tokenizer`, `cache` and `timeout_seconds` may be given.
        prefixes: weights of pairs by prefix or address; or a list of prefixes, which uses all samples of each pair
            once.
        sequence_length: S, tokens of a sample, at least 1.
        split: shares of training, validation and test in every pair, such as "98,1,1"; by default all is training.
        size: samples of training, or a mapping with the keys of the table `size` of a blend file, such as
            `{"train_tokens": "2B", "valid": 100}`. Required with weights.
        tokenizer: what a blend file has under this key, such as "tokenizer.json" or "bytes", or an object with `eod`,
            `pad`, `vocab_size` and `unique_identifiers`. Replaces the tokenizer of the blend file; required if the file
            has none.
        cache: folder of the indices; replaces the folder of the blend file.
        seed: seed of every shuffle, in `[0, 2**32)`; 1234 by default.
        order: order of the samples; "megatron" by default.
        timeout_seconds: seconds without a sign of life after which a rank counts as dead, and that ranks wait for each
            other at the start; 600 by default, and of `torch.distributed` its own timeout.

    Returns:
        The datasets of the splits, as `train`, `valid` and `test`.

    Raises:
        OSError: the blend file cannot be read.
        BlendFileError: settings are invalid, or data are missing or damaged; lists all problems.
        PlanError: the data cannot give the samples asked for.
        CacheError: an index cannot be read, built or written.
        CollectiveError: among several ranks, one of them failed, or they ask for different blends.
    """
    settings = {"prefixes": prefixes, "sequence_length": sequence_length, "split": split, "size": size}
    settings |= {"seed": seed, "order": order}
    is_number = isinstance(timeout_seconds, (int, float)) and not isinstance(timeout_seconds, bool)
    is_usable = timeout_seconds is None or (is_number and timeout_seconds > 0)  # not a NaN either
    group = _group(timeout_seconds if is_usable else None)
    with group.guarded("opening the blend") as step, polling(step.poll):
        if not is_usable:
            msg = f"{_WHERE}: timeout_seconds must be a number above 0, found {timeout_seconds!r}"
            raise ArgumentError(msg)
        if not isinstance(cache, (str, os.PathLike, NoneType)):
            msg = f"{_WHERE}: cache must be the path of a folder, found a {type(cache).__name__}"
            raise ArgumentError(msg)
        blend, opened = _measured(path, settings, tokenizer, None if cache is None else os.fspath(cache))
        config = blend.config(tokenizer=opened, cache=None if cache is None else os.fspath(cache))
        if "num_dataset_builder_threads" not in blend.file.options:
            config.num_dataset_builder_threads = threads_per_rank()
        builder = BlendedMegatronDatasetBuilder(
            blend.dataset_class, blend.sizes, lambda: True, config, group=group, headers=blend.headers
        )
    return Splits(str(blend.file.path), builder.build())


def _measured(
    path: str | os.PathLike[str] | None, settings: Mapping[str, Any], tokenizer: Any, cache: str | None
) -> tuple[MeasuredBlend, Any]:
    """Returns the blend, and the tokenizer if it was given as an object."""
    if path is not None and not isinstance(path, (str, os.PathLike)):
        found = f"a {type(path).__name__}"
        msg = f"{_WHERE}: path must be that of a blend file, found {found}; prefixes are given as prefixes=..."
        raise ArgumentError(msg)
    given = [name for name, value in settings.items() if value is not None]
    if path is None and settings["prefixes"] is None:
        msg = f"{_WHERE}: must have the path of a blend file, or prefixes, found neither"
        raise ArgumentError(msg)
    if path is not None and given:
        msg = f"{_WHERE}: a blend file must state these itself, found them given beside it: {', '.join(given)}"
        raise ArgumentError(msg)
    file = read_blend_file(path) if path is not None else read_blend_table(_table(settings, cache), where=_WHERE)
    is_setting = isinstance(tokenizer, (str, os.PathLike, Mapping))
    if is_setting:
        file = with_tokenizer(file, os.fspath(tokenizer) if isinstance(tokenizer, os.PathLike) else tokenizer)
    blend = measure_blend(file)
    plan_blend(blend).problems.stop()
    return blend, None if is_setting else tokenizer


def _table(settings: Mapping[str, Any], cache: str | None) -> dict[str, Any]:
    """Returns the arguments as the keys of a blend file."""
    prefixes, size = settings["prefixes"], settings["size"]
    if isinstance(prefixes, (str, os.PathLike)):
        prefixes = [prefixes]
    if not isinstance(prefixes, (Mapping, Sequence)):
        found = f"a {type(prefixes).__name__}"
        msg = f"{_WHERE}: prefixes must be a mapping to weights, or a list, as their order matters, found {found}"
        raise ArgumentError(msg)
    wrong = [one for one in prefixes if not isinstance(one, (str, os.PathLike))]
    if wrong:
        msg = f"{_WHERE}: prefixes must be paths or addresses, found one of type {type(wrong[0]).__name__}"
        raise ArgumentError(msg)
    weights = prefixes if isinstance(prefixes, Mapping) else {}
    datasets = [
        {
            "path": os.fspath(prefix),
            "name": os.fspath(prefix),
            **({"weight": _plain(weights[prefix])} if prefix in weights else {}),
        }
        for prefix in prefixes
    ]
    given = {
        name: _plain(settings[name]) for name in ("sequence_length", "seed", "order") if settings[name] is not None
    }
    if not (
        size is None or is_integer(size) or (isinstance(size, Mapping) and all(isinstance(key, str) for key in size))
    ):
        msg = f"{_WHERE}: size must be a number of samples, or a mapping with keys such as 'train', found {size!r}"
        raise ArgumentError(msg)
    sizes = {} if size is None else dict(size) if isinstance(size, Mapping) else {"train": size}
    return {
        **given,
        "split": settings["split"] or "1",
        "dataset": datasets,
        **({"size": {key: _plain(value) for key, value in sizes.items()}} if sizes else {}),
        **({} if cache is None else {"cache": cache}),
    }


def _plain(value: Any) -> Any:
    """Returns a number of NumPy as one of Python, and other values as they are."""
    return value.item() if isinstance(value, np.generic) else value


def _group(timeout_seconds: float | None) -> Group:
    """Returns the ranks of `torch.distributed`, else those of the launcher."""
    group = current_group() or group_from_environment(timeout_seconds, shares_port=True)
    return SOLO if group.size == 1 else group


class _Passes(MegatronPretrainingSampler):
    """Sampler of passes over the dataset: after one that has ended, wherever it began, the next one is whole."""

    def __iter__(self) -> Iterator[list[int]]:
        """Iterates over the micro batches of this rank, from the position to the end of the pass."""
        left = self.total_samples - self.consumed_samples
        if left < (self.micro_batch_times_data_parallel_size if self.drop_last else 1):
            self.consumed_samples = 0
        yield from super().__iter__()
        self.consumed_samples = self._yielded


class BatchLoader(_BatchLoader):
    """Prefetches and returns the batches of this rank, in the order of the dataset, which is shuffled already.

    The base class, `trackbed.loading.BatchLoader`, takes a sampler in the place of `batch_size`.

    A batch is a mapping of tensors: `tokens`, `labels` (the next tokens) and `position_ids`, int64 `[B, S]`,
    `loss_mask`, float32 `[B, S]`, and of a blend `dataset_id` `[B]`, the number of the dataset. With the options
    `create_attention_mask` and `create_cu_seqlens` it also has `attention_mask`, bool `[B, 1, S, S]`, True where
    attention is masked; and `cu_seqlens`, int32 `[B, S + 1]`, and `max_seqlen`, int32 `[B]`.

    Each step reads samples that follow one another in the dataset, and each rank a contiguous part of them, in the
    order of the ranks or, with `shuffle_ranks`, in one that is drawn for each step. One rank with a larger batch would
    read the same samples. Rank and number of ranks are taken from `torch.distributed` if it is initialised, else from
    the launcher. A saved state resumes on any number of ranks.

    If a loop ends early, the next loop goes on from there. If no whole step is left, it begins with the first sample
    again.

    Args:
        dataset: dataset of the samples.
        batch_size: samples per rank and step, at least 1.
        consumed_samples: number of samples that all ranks together have trained on before, in `[0, len(dataset))`. For
            a run whose position was not saved by a loader, such as a run of Megatron-LM.
        drop_last: True to drop the samples at the end that do not fill a step of all ranks. If False, each rank gets a
            part of these samples, which may be empty.
        rank: number of this process among the processes that read different samples, in `[0, num_ranks)`: with tensor
            parallelism, the data-parallel rank. Must be given together with `num_ranks`.
        num_ranks: number of processes that read different samples; by default all processes.
        ahead: number of batches to prefetch, at least 1.
        num_threads: threads that gather a batch; None for this rank's share of the CPUs.
        pinned: True for page-locked memory.
        device: CUDA device to which batches are copied.
        shuffle_ranks: True to draw in each step, by the seed of the dataset, which rank reads which part; by default in
            the order "instant" alone, in which neighbouring samples come from the datasets in turn, so that a rank that
            always reads the same part would miss some of them. A saved state says which it was, and a loader that
            resumes from it does the same.

    Attributes:
        rank: number of this process among those that read different samples.
        num_ranks: number of these processes.

    Raises:
        ArgumentError: an argument is out of range, or the dataset has too few samples for a step.
    """

    def __init__(
        self,
        dataset: SplitDataset,
        *,
        batch_size: int,
        consumed_samples: int = 0,
        drop_last: bool = True,
        rank: int | None = None,
        num_ranks: int | None = None,
        ahead: int = 2,
        num_threads: int | None = None,
        pinned: bool = False,
        device: torch.device | str | None = None,
        shuffle_ranks: bool | None = None,
    ) -> None:
        rank, size = _place() if rank is None and num_ranks is None else _given_place(rank, num_ranks)
        if not isinstance(dataset, Gathering):
            msg = f"dataset must be that of a split, such as splits.train, found a {type(dataset).__name__}"
            raise ArgumentError(msg)
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, consumed_samples=consumed_samples)
        if not isinstance(drop_last, (bool, np.bool_)):
            msg = f"drop_last must be True or False, found {drop_last!r}"
            raise ArgumentError(msg)
        if not isinstance(shuffle_ranks, (bool, np.bool_, NoneType)):
            msg = f"shuffle_ranks must be True, False or None, found {shuffle_ranks!r}"
            raise ArgumentError(msg)
        config = getattr(dataset, "config", None)
        shuffles = getattr(config, "order", None) == "instant" if shuffle_ranks is None else bool(shuffle_ranks)
        self.rank = rank
        self.num_ranks = size
        self._step = batch_size * size
        self._drop_last = drop_last
        if not len(dataset):
            msg = f"dataset must have at least 1 sample, found none in {dataset!r}"
            raise ArgumentError(msg)
        if drop_last and len(dataset) < self._step:
            msg = (
                f"dataset must have at least {number_of(self._step, 'sample')}, one step of {number_of(size, 'rank')} "
                f"with batch_size {batch_size}, found {len(dataset):,}; drop_last=False returns them"
            )
            raise ArgumentError(msg)
        sampler = _Passes(
            len(dataset),
            consumed_samples,
            batch_size,
            rank,
            size,
            drop_last,
            fingerprint=getattr(dataset, "fingerprint", None),
            rank_seed=int(getattr(config, "random_seed", 0)) if shuffles else None,
        )
        super().__init__(
            dataset,
            sampler,
            ahead=ahead,
            num_threads=threads_per_rank() if num_threads is None else num_threads,
            pinned=pinned,
            device=device,
        )

    def __len__(self) -> int:
        """Number of steps of a whole iteration."""
        return len(self.dataset) // self._step if self._drop_last else -(-len(self.dataset) // self._step)

    def __repr__(self) -> str:
        """Says how the samples are divided."""
        steps, samples = number_of(len(self), "step"), number_of(self._step, "sample")
        return f"<BatchLoader: {steps} of {samples} on {number_of(self.num_ranks, 'rank')}, {self.dataset!r}>"


def _given_place(rank: int | None, num_ranks: int | None) -> tuple[int, int]:
    check_at_least(1, num_ranks=num_ranks)
    check_at_least(0, rank=rank)
    if rank >= num_ranks:  # type: ignore[operator]  # both are integers
        msg = f"rank must be below num_ranks {num_ranks}, found {rank}"
        raise ArgumentError(msg)
    return rank, num_ranks  # type: ignore[return-value]


def _place() -> tuple[int, int]:
    """Returns the rank of this process, and the number of ranks."""
    group = current_group()
    if group is not None:
        return group.rank, group.size
    launch = parse_launch(os.environ)
    return (0, 1) if launch is None else (launch.rank, launch.size)
