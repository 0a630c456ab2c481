"""Loader of this rank's batches: `trackbed.BatchLoader`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, repeat
from types import NoneType
from typing import Any

import numpy as np
import torch

from trackbed.comm.launch import parse_launch, threads_per_rank
from trackbed.comm.torch_group import current_group
from trackbed.datasets.batches.context import Context
from trackbed.datasets.batches.reader import check_split
from trackbed.datasets.blend.dataset import SplitDataset
from trackbed.datasets.config import COMPUTED
from trackbed.errors import ArgumentError
from trackbed.kernels.integers import check_at_least
from trackbed.loading.balanced_sampler import BalancedSampler
from trackbed.loading.batch_stream import BatchStream
from trackbed.loading.pack_layouts import LayoutName, check_context
from trackbed.loading.samplers import Passes
from trackbed.loading.skipped import Skipped
from trackbed.plural import number_of


class BatchLoader(BatchStream):
    """Prefetches and returns the batches of this rank, in the order of the dataset, which is shuffled already.

    The base class, `trackbed.loading.BatchStream`, takes a sampler in the place of `batch_size`.

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
            the orders "instant" and "packed" alone, in which neighbouring samples come from the datasets in turn, so
            that a rank that always reads the same part would miss some of them. A saved state says which it was, and a
            loader that resumes from it does the same.
        skip: pairs of a first and a last position in the dataset to leave out, such as `[[4096, 8191]]`. The samples
            behind them fill the batches.
        layout: of a dataset in the order "packed", how packs are laid out: "thd" for packs end to end, `[1, B * S]`,
            with `cu_seqlens`, `cu_seqlens_padded` and `max_seqlen`, as Megatron Core's main branch has it; "torch" with
            `cu_seq_q`, `cu_seq_k`, `max_q` and `max_k`; "bridge" with the names of Megatron-Bridge, for a batch of one
            pack; None for rows `[B, S]`.
        pad_borders: True for as many borders of documents in each batch, as CUDA graphs need them.
        context_rank: of a dataset in the order "packed", number of this rank among those that share each sample by
            context parallelism, in `[0, context_size)`. It gathers its places alone: the part of the batch that
            `trackbed.loading.slice_for_context` returns.
        context_size: number of these ranks; the option `pack_multiple` must be a multiple of twice of it. With more
            than 1, `rank` and `num_ranks` must be given, which all of them have in common.
        balanced: of a dataset in the order "packed", True to give all ranks the same work in each global batch, in the
            place of `shuffle_ranks`: see `trackbed.BalancedSampler`. Needs `global_batch_size` and `hidden_size`, and
            drops the samples at the end that do not fill a global batch.
        global_batch_size: with `balanced`, samples that all ranks read between two updates of the model, a multiple of
            `batch_size * num_ranks`.
        hidden_size: with `balanced`, width of the model, which decides what a long document costs.

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
        skip: Iterable[Sequence[int]] = (),
        layout: LayoutName | None = None,
        pad_borders: bool = False,
        context_rank: int = 0,
        context_size: int = 1,
        balanced: bool = False,
        global_batch_size: int | None = None,
        hidden_size: int | None = None,
    ) -> None:
        check_split(dataset)
        check_context(dataset, Context(context_rank, context_size))
        if context_size > 1 and rank is None and num_ranks is None:
            raise ArgumentError(
                f"rank and num_ranks must be given with context_size={context_size}: ranks of a context read the same "
                "samples"
            )
        rank, size = _place() if rank is None and num_ranks is None else _given_place(rank, num_ranks)
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, consumed_samples=consumed_samples)
        if not isinstance(drop_last, (bool, np.bool_)):
            raise ArgumentError(f"drop_last must be True or False, found {drop_last!r}")
        if not isinstance(shuffle_ranks, (bool, np.bool_, NoneType)):
            raise ArgumentError(f"shuffle_ranks must be True, False or None, found {shuffle_ranks!r}")
        balance = _balance(balanced, global_batch_size, hidden_size)
        if balance is not None and (shuffle_ranks or not drop_last):
            raise ArgumentError(
                "balanced=True takes the place of shuffle_ranks and needs drop_last, found "
                f"shuffle_ranks={shuffle_ranks} and drop_last={drop_last}"
            )
        config = getattr(dataset, "config", None)
        shuffles = getattr(config, "order", None) in COMPUTED if shuffle_ranks is None else bool(shuffle_ranks)
        self.rank = rank
        self.num_ranks = size
        self._step = batch_size * size
        self._whole = self._step if balance is None else balance["global_batch_size"]
        self._drop_last = drop_last
        self._skipped = Skipped(skip)
        skip = self._skipped.ranges()
        num_kept = self._num_samples = self._skipped.num_kept(len(dataset))
        if not num_kept:
            left_out = " that is not left out" if len(dataset) else ""
            raise ArgumentError(f"dataset must have at least 1 sample{left_out}, found none in {dataset!r}")
        if balance is None and drop_last and num_kept < self._step:
            raise ArgumentError(
                f"dataset must have at least {number_of(self._step, 'sample')}, one step of {number_of(size, 'rank')} "
                f"with batch_size {batch_size}, found {num_kept:,}; drop_last=False returns them"
            )
        if num_kept < self._whole and balance is not None:
            raise ArgumentError(
                f"dataset must have at least {number_of(self._whole, 'sample')}, a global batch, found {num_kept:,}"
            )
        sampler = (
            Passes(
                len(dataset),
                consumed_samples,
                batch_size,
                rank,
                size,
                drop_last,
                fingerprint=getattr(dataset, "fingerprint", None),
                rank_seed=int(getattr(config, "random_seed", 0)) if shuffles else None,
                skip=skip,
            )
            if balance is None
            else BalancedSampler(
                dataset,
                micro_batch_size=batch_size,
                rank=rank,
                num_ranks=size,
                consumed_samples=consumed_samples,
                skip=skip,
                **balance,
            )
        )
        super().__init__(
            dataset,
            sampler,
            ahead=ahead,
            num_threads=threads_per_rank() if num_threads is None else num_threads,
            pinned=pinned,
            device=device,
            layout=layout,
            pad_borders=pad_borders,
            context_rank=context_rank,
            context_size=context_size,
        )

    def __len__(self) -> int:
        """Number of steps of a whole iteration."""
        whole = self._num_samples // self._whole * (self._whole // self._step)
        return whole if self._drop_last else -(-self._num_samples // self._step)

    def change_data(self, dataset: SplitDataset) -> None:
        """Goes on in another dataset: see `BatchStream.change_data`."""
        num_kept = self._skipped.num_kept(len(dataset))
        if self._drop_last and num_kept < self._whole:
            raise ArgumentError(f"dataset must have at least {number_of(self._whole, 'sample')}, found {num_kept:,}")
        super().change_data(dataset)
        self._num_samples = num_kept

    @property
    def consumed_samples(self) -> int:
        """Position behind the last returned batch, of all ranks together."""
        return int((self._position() if self._run is None else self._state or {})["consumed_samples"])

    def division(self) -> dict[str, Any]:
        """Returns how samples are divided among the ranks, as plain values: the further arguments of `samples_of`."""
        sampler = self.sampler
        seed = sampler.rank_seed if isinstance(sampler, Passes) else None
        sizes = {"batch_size": self._step // self.num_ranks, "num_ranks": self.num_ranks}
        sizes |= {"total_samples": len(self.dataset), "drop_last": bool(self._drop_last)}
        return {**sizes, "rank_seed": seed, "skip": self._skipped.ranges(), "balance": self.balance}

    @property
    def global_batch_size(self) -> int:
        """Samples that are read together: those of a global batch with `balanced`, else of a batch of all ranks."""
        return self._whole

    @property
    def balance(self) -> dict[str, int] | None:
        """`global_batch_size` and `hidden_size` of a loader with `balanced`; None without."""
        sampler = self.sampler
        if not isinstance(sampler, BalancedSampler):
            return None
        return {"global_batch_size": sampler.global_batch_size, "hidden_size": sampler.hidden_size}

    def __repr__(self) -> str:
        """Says how the samples are divided."""
        steps, samples = number_of(len(self), "step"), number_of(self._step, "sample")
        return f"<BatchLoader: {steps} of {samples} on {number_of(self.num_ranks, 'rank')}, {self.dataset!r}>"


def samples_of(
    first: int,
    num_samples: int,
    rank: int | None,
    *,
    batch_size: int,
    num_ranks: int,
    total_samples: int,
    drop_last: bool,
    rank_seed: int | None,
    skip: Sequence[Sequence[int]],
    balance: Mapping[str, int] | None = None,
    dataset: SplitDataset | None = None,
) -> list[int]:
    """Returns the positions of the samples that a rank has read in a step, or that all ranks have, in their order.

    Args:
        first: position of the first sample of the step.
        num_samples: number of its samples, on all ranks.
        rank: the rank; None for all.
        batch_size: samples of a rank and micro-batch.
        num_ranks: number of ranks.
        total_samples: samples of the dataset, behind which its first one follows.
        drop_last: see `BatchLoader`.
        rank_seed: see `MegatronPretrainingSampler`.
        skip: pairs of a first and a last position that were left out.
        balance: `global_batch_size` and `hidden_size` of a loader with `balanced`; None without.
        dataset: the dataset, which is needed for one rank of such a loader.

    Raises:
        ArgumentError: an argument is out of range, or there is no `dataset` where one is needed.

    >>> division = {"batch_size": 2, "num_ranks": 2, "total_samples": 99, "drop_last": True, "rank_seed": None}
    >>> samples_of(8, 8, 1, **division, skip=[[9, 9]]), samples_of(96, 8, None, **division, skip=[])
    ([11, 12, 15, 16], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    if rank is None:
        rank, num_ranks, batch_size = 0, 1, batch_size * num_ranks
        balance = None  # a global batch has the samples that it has without balance
    sampler: Passes
    if balance is None:
        sampler = Passes(total_samples, first, batch_size, rank, num_ranks, drop_last, rank_seed=rank_seed, skip=skip)
    elif dataset is None:
        raise ArgumentError("the samples of a rank with balance need the dataset, found none")
    else:
        place: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks, "consumed_samples": first, "skip": skip}
        place |= {"global_batch_size": balance["global_batch_size"], "hidden_size": balance["hidden_size"]}
        sampler = BalancedSampler(dataset, micro_batch_size=batch_size, **place)
    batches = chain.from_iterable(repeat(sampler))
    return list(chain.from_iterable(islice(batches, -(-num_samples // (batch_size * num_ranks)))))


def _balance(balanced: object, global_batch_size: int | None, hidden_size: int | None) -> dict[str, int] | None:
    """Returns the arguments of a balanced sampler; None without balance."""
    if not isinstance(balanced, (bool, np.bool_)):
        raise ArgumentError(f"balanced must be True or False, found {balanced!r}")
    if not balanced and global_batch_size is None and hidden_size is None:
        return None
    if not balanced or global_batch_size is None or hidden_size is None:
        raise ArgumentError(
            "balanced=True, global_batch_size and hidden_size must be given together, found "
            f"{balanced}, {global_batch_size} and {hidden_size}"
        )
    check_at_least(1, global_batch_size=global_batch_size, hidden_size=hidden_size)
    return {"global_batch_size": global_batch_size, "hidden_size": hidden_size}


def _given_place(rank: int | None, num_ranks: int | None) -> tuple[int, int]:
    check_at_least(1, num_ranks=num_ranks)
    check_at_least(0, rank=rank)
    if rank >= num_ranks:  # type: ignore[operator]  # both are integers
        raise ArgumentError(f"rank must be below num_ranks {num_ranks}, found {rank}")
    return rank, num_ranks  # type: ignore[return-value]


def _place() -> tuple[int, int]:
    """Returns the rank of this process, and the number of ranks."""
    group = current_group()
    if group is not None:
        return group.rank, group.size
    launch = parse_launch(os.environ)
    return (0, 1) if launch is None else (launch.rank, launch.size)
