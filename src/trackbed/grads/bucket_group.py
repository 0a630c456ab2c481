"""Groups of buckets that are communicated together. Names and attributes are Megatron Core 0.16.1's.

A group is filling while gradients arrive, ready when all have arrived that are expected, issued once its reduction has
begun, and reduced until the next `reset`.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trackbed.errors import GradientError
from trackbed.grads.buffer import _ParamAndGradBucket
from trackbed.grads.collectives import Collectives, Label, SoloCollectives, TorchCollectives, Work, shard_of
from trackbed.grads.collectives.torch import is_replaced
from trackbed.grads.config import ReductionOptions
from trackbed.grads.failure_aware_wait import StreamsThatWaited, Waiter
from trackbed.grads.gradient_check import (
    FiniteCheck,
    NormHistory,
    check_finite,
    has_judge,
    is_judged_large,
    norm_of,
)
from trackbed.grads.timeline import BucketObserver

logger = logging.getLogger(__name__)

Parameter = torch.nn.Parameter


class _ParamAndGradBucketGroup:
    """Buckets whose gradients are reduced, and whose parameters are gathered, together.

    Args:
        buckets: buckets, at least one.
        ddp_config: options.
        collective_group: object with `size()` and `rank()`: the ranks over which the optimizer is sharded, or all
            data-parallel ranks without sharding.
        collective_group_size: number of its ranks.

    Raises:
        GradientError: options contradict each other.
    """

    def __init__(
        self,
        buckets: Sequence[_ParamAndGradBucket],
        ddp_config: ReductionOptions,
        collective_group: Any,
        collective_group_size: int,
    ) -> None:
        self.buckets = list(buckets)
        self.ddp_config = ddp_config
        self._is_sharded = ddp_config.use_distributed_optimizer
        if self._is_sharded:
            self.intra_distributed_optimizer_instance_group = collective_group
            self.intra_distributed_optimizer_instance_size = collective_group_size
            self.intra_distributed_optimizer_instance_rank = collective_group.rank()
        else:
            self.data_parallel_group = collective_group
        self._has_instances = ddp_config.num_distributed_optimizer_instances > 1
        if self._has_instances:
            self.inter_distributed_optimizer_instance_group: Any = None
            self.communication_stream: Any = None
            if ddp_config.reduce_scatter_with_fp32_accumulation:
                raise GradientError(
                    "reduce_scatter_with_fp32_accumulation needs num_distributed_optimizer_instances = 1, but that is "
                    f"{ddp_config.num_distributed_optimizer_instances}"
                )
        self.param_to_bucket = {param: bucket for bucket in self.buckets for param in bucket.params_list}
        self.params = set(self.param_to_bucket)
        self.next_param_gather_bucket_group: _ParamAndGradBucketGroup | None = None

        self._num_ranks = collective_group_size
        self.collectives: Collectives = SoloCollectives()
        self.torch_collectives: Collectives | None = None
        """Used where a caller asks for an all-reduce, or has put its own function in the place of torch's; None if the
        group is not one of torch."""
        if isinstance(collective_group, torch.distributed.ProcessGroup):
            accumulates = ddp_config.reduce_scatter_with_fp32_accumulation
            device = self.buckets[0].grad_data.device
            self.collectives = TorchCollectives(collective_group, fp32_accumulation=accumulates, device=device)
            self.torch_collectives = self.collectives
        self.label = Label()
        """Step, and number of this group among those of the wrapper."""
        self.observer: BucketObserver | None = None
        self.waiter = Waiter()
        self.finite_check: FiniteCheck | None = None
        """Looks at gradients where the host is to wait for no GPU; None to raise an error at once."""
        self.issue: Callable[[bool], None] = self.start_grad_sync
        """Called when the group is ready, with `force_all_reduce`: reduces it now, or in its turn."""

        self.issued_flag, self.last_flag = [False], [True]
        """`is_issued` and `is_last_microbatch`, in lists that the hooks of parameters keep."""
        self.is_first_batch = True
        self.grad_reduce_handle: Work | None = None
        self.param_gather_handle: Work | None = None
        self.gathered: StreamsThatWaited | None = None
        """Streams that have waited for the last gather on a GPU; None where the host waits."""
        self._is_on_gpu = self.buckets[0].grad_data.is_cuda
        self.param_gather_dispatched = False
        self.is_gathered_by_step = False
        """True if the optimizer's step begins the gather, so that parameters stay current until then."""

        self._params = list(self.param_to_bucket)
        self._slots = {param: slot for slot, param in enumerate(self._params)}
        self._counts = [0] * len(self._params)
        """Gradients of each parameter that have arrived since `reset`, in backward passes that are to be reduced."""
        self.has_arrived = [False] * len(self._params)
        """True for each parameter of which a gradient has arrived in `main_grad` since `reset`; hooks keep the list."""
        self.counts_written = False
        """True if a gradient that the program has written into `main_grad` counts as arrived once it is reduced."""
        self.learns_from_dropped_steps = True
        """True if a first step that was not reduced tells how many gradients to expect, as in Megatron Core, whose
        programs seed the counts so. Groups of Trackbed's own wrapper learn from reduced steps alone."""
        self._expected = [1] * len(self._params)
        self._num_incomplete = len(self._params)
        """Number of parameters with fewer gradients than expected."""
        self._norms = NormHistory()
        self._param_versions: list[int] | None = None
        """Number of writes to each parameter when its gather began; None if no gather runs that is watched."""
        self._versions: list[int] | None = None
        """Number of changes of the gradients of each bucket when their reduction began; None if no reduction runs."""

    @property
    def is_issued(self) -> bool:
        """True from the moment when a reduction begins until `reset`."""
        return self.issued_flag[0]

    @is_issued.setter
    def is_issued(self, value: bool) -> None:
        self.issued_flag[0] = value

    @property
    def is_last_microbatch(self) -> bool:
        """True if gradients that arrive are those of the last backward pass before a reduction."""
        return self.last_flag[0]

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self.last_flag[0] = value

    @property
    def per_param_grad_ready_counts(self) -> dict[Parameter, int]:
        """Number of gradients that have arrived, for each parameter with any."""
        return {param: count for param, count in zip(self._params, self._counts, strict=True) if count}

    @property
    def has_counted(self) -> bool:
        """True if gradients have arrived since `reset`, in backward passes that are to be reduced."""
        return any(self._counts)

    @property
    def golden_per_param_grad_ready_counts(self) -> dict[Parameter, int]:
        """Number of gradients of each parameter after which the group is ready; empty in the first step."""
        return {} if self.is_first_batch else dict(zip(self._params, self._expected, strict=True))

    def slot_of(self, param: Parameter) -> int:
        """Number of a parameter in this group, for `count`."""
        return self._slots[param]

    def missing(self) -> list[str]:
        """Names of the parameters without a gradient since `reset`, but for those that are frozen."""
        pairs = zip(self._params, self._counts, strict=True)
        return [self._name(slot) for slot, (param, count) in enumerate(pairs) if not count and param.requires_grad]

    def without_gradient(self) -> list[Parameter]:
        """Parameters that require a gradient, and have none since `reset`: none has arrived, and it is all zero."""
        pairs = zip(self._params, self.has_arrived, strict=True)
        lacking = [param for param, has_arrived in pairs if not has_arrived and param.requires_grad]
        if not lacking:
            return []
        # Of all at once, so that a GPU is waited for once.
        written = torch.stack([param.main_grad.any() for param in lacking])  # type: ignore[attr-defined]
        flags = self.waiter.read(written, "gradients that the program may have written").tolist()
        return [param for param, is_written in zip(lacking, flags, strict=True) if not is_written]

    def drop_reduction(self) -> None:
        """Forgets a reduction that is running, for which other ranks may never come."""
        self.grad_reduce_handle = None
        self._versions = None

    def reset(self) -> None:
        """Prepares for the next step: drops what has been counted, after a reduction that is running.

        The next step expects as many gradients as the last one that was reduced, if each parameter had any; see also
        `learns_from_dropped_steps`.
        """
        # First: a reduction that is running still writes into the gradients, and would overwrite the zeros, or the
        # first gradients, of the next step.
        self._drain()
        is_learned = self.is_issued or (self.learns_from_dropped_steps and self.is_first_batch)
        # A step in which a parameter has no gradient teaches nothing: a group that expects none of it would never be
        # ready.
        if all(self._counts) and is_learned:
            self._expected = self._counts
            self.is_first_batch = False
        self._counts = [0] * len(self._params)
        # In place: the hooks of the parameters keep this list.
        self.has_arrived[:] = [False] * len(self._params)
        self._num_incomplete = len(self._params)
        self.is_issued = False
        self.is_last_microbatch = True

    def check_grads(
        self,
        check_for_nan_or_inf: bool,
        check_for_large: bool,
    ) -> None:
        """Checks the norm of the gradients of each bucket; under Megatron Core's paths, with its rerun state machine.

        Raises:
            NonFiniteGradientError: it is NaN or infinite, and there is no `finite_check`; the message names the
                parameter.
        """
        finite_check = self.finite_check
        if finite_check is not None and check_for_nan_or_inf and not check_for_large and not has_judge():
            for bucket in self.buckets:
                finite_check.look_at(bucket)
            return
        for number, bucket in enumerate(self.buckets):
            # Before the sum over the ranks, which would spread a NaN to all of them, so that none could name its
            # origin.
            norm = norm_of(bucket.grad_data)
            if check_for_nan_or_inf:
                check_finite(bucket, norm, number, self.collectives.rank())
            if not check_for_large:
                continue
            is_judged = is_judged_large(norm, number)
            if self._norms.is_large(norm) and not is_judged:
                logger.warning(
                    "rank %d, bucket %d: the norm of its gradients is %g, over 10 times the largest so far, %g",
                    *(self.collectives.rank(), bucket.bucket_id, norm, self._norms.largest),
                )

    def register_grad_ready(
        self,
        param: Parameter,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Counts a gradient that has arrived, unless more backward passes follow, and reduces a group that is ready.

        Raises:
            GradientError: `overlap_grad_reduce` is off, the parameter is not of this group, or the group has been
                reduced.
        """
        if not self.ddp_config.overlap_grad_reduce:
            raise GradientError(
                "register_grad_ready() must be called with overlap_grad_reduce=True only, but that is False"
            )
        if self.is_last_microbatch:
            slot = self._slots.get(param)
            if slot is None:
                raise GradientError(
                    f"bucket {self.buckets[0].bucket_id}: the parameter must be in the bucket group, but is not"
                )
            if self.is_issued:
                raise GradientError(self.describe_late(slot))
            self.count(slot, bool(force_all_reduce))

    def count(self, slot: int, force_all_reduce: bool) -> None:
        """Counts a gradient of the parameter in `slot`, and calls `issue` if it was the last one expected."""
        counts = self._counts
        counts[slot] += 1
        # Equal, not at least: a further gradient of the same parameter must not stand for one of another parameter.
        if counts[slot] == self._expected[slot]:
            self._num_incomplete -= 1
            # In the first step nobody knows how many gradients come. A second backward pass, or a reentrant checkpoint
            # over a shared weight, brings another one, which would be added after the first was reduced.
            if not self._num_incomplete and not self.is_first_batch:
                if self.observer is not None:
                    self.observer.ready(self.label)
                self.issue(force_all_reduce)

    def describe_late(self, slot: int) -> str:
        """Text of the error for a gradient that arrives after the group has been reduced."""
        bucket = self.param_to_bucket[self._params[slot]].bucket_id
        return (
            f"rank {self.collectives.rank()}: all gradients must arrive before their bucket is reduced, but one of "
            f"{self._name(slot)} arrived after bucket {bucket} was: call zero_grad() of the optimizer before the "
            "backward passes of a step, run all but the last of them in no_sync(), call requires_grad_(False) of the "
            "model while a loss of another one passes through it, and wrap the model again after switching reentrant "
            "activation checkpointing on"
        )

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Begins to reduce the gradients, and waits for the end unless `overlap_grad_reduce` is on.

        Args:
            force_all_reduce: True for an all-reduce, by torch if the group is one of torch, even where the optimizer
                is sharded.

        Raises:
            GradientError: a reduction is running, a gradient is NaN or infinite and that is checked, or the group has
                no means to communicate.
            CollectiveError: the reduction failed.
        """
        if self.grad_reduce_handle is not None:
            if self.is_first_batch:
                return
            raise GradientError(
                f"bucket {self.buckets[0].bucket_id}: finish_grad_sync() must be called before another "
                "start_grad_sync(), but a reduction is running"
            )
        config = self.ddp_config
        # Now, because the reduction replaces what this rank has written by a sum, which may be zero.
        if self.counts_written and not all(self.has_arrived):
            self._mark_written_as_arrived()
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(config.check_for_nan_in_grad, config.check_for_large_grads)
        # Before anything is sent: a gradient that arrives from here on may miss the sum, or come on top of it on this
        # rank alone. Its hook sees the flag and raises.
        self.is_issued = True
        if self._has_instances:
            self._reduce_over_instances(force_all_reduce=bool(force_all_reduce))
            return
        work = self._reduce(force_all_reduce=bool(force_all_reduce))
        if config.overlap_grad_reduce:
            self.grad_reduce_handle = work
            # Counted after `_reduce`, which may scale the gradients itself, and before the program runs again.
            self._versions = self._count_changes()
        else:
            self.waiter.wait(work, self._describe("reduction of gradients"))

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Waits until the gradients are reduced, which begins here if it has not yet.

        Raises:
            GradientError: gradients are missing (from the second step on), or `start_grad_sync` raises.
            CollectiveError: the reduction failed.
        """
        if not self.ddp_config.overlap_grad_reduce:
            self._note_old_params()
            self.start_grad_sync(force_all_reduce)
            return
        if self.grad_reduce_handle is None and (self.is_first_batch or all(self._counts)) and not self._is_reduced():
            self.start_grad_sync(force_all_reduce)
        if self._is_reduced():
            raise GradientError(
                f"bucket {self.buckets[0].bucket_id}: zero_grad_buffer() must be called before another "
                "finish_grad_sync(), but was not"
            )
        if self.grad_reduce_handle is None and not self._has_instances:
            arrived = sum(map(bool, self._counts))
            raise GradientError(
                f"bucket {self.buckets[0].bucket_id}: the gradients of all parameters must have arrived before "
                f"finish_grad_sync(), but only those of {arrived} of {len(self._params)} have"
            )
        self.wait_for_grads()

    def wait_for_grads(self) -> None:
        """Waits for a reduction that is running, if any. Parameters that were gathered count as old from then on."""
        self.wait_for_params()  # a gather that no module of the last forward pass has waited for
        self._note_old_params()
        # The sums are written on the other stream: kernels of this one would read them half-written.
        if self._has_instances and self.communication_stream is not None:
            torch.cuda.current_stream().wait_stream(self.communication_stream)
        if self.grad_reduce_handle is not None:
            # The handle is dropped only after the wait: if that raises, the reduction may still be running, and `reset`
            # has to wait for it.
            self.waiter.wait(self.grad_reduce_handle, self._describe("reduction of gradients"))
            self.grad_reduce_handle = None
            self._versions = None

    def first_changed(self) -> int | None:
        """Number of the first bucket whose gradients were changed while they are being reduced; None if none was."""
        if self._versions is None:
            return None
        pairs = zip(self.buckets, self._versions, self._count_changes(), strict=True)
        return next((bucket.bucket_id for bucket, old, new in pairs if old != new), None)

    def _mark_written_as_arrived(self) -> None:
        """Counts gradients that the program has written. A sum of theirs over the ranks may be zero."""
        lacking = set(self.without_gradient())
        self.has_arrived[:] = [
            has_arrived or param not in lacking
            for param, has_arrived in zip(self._params, self.has_arrived, strict=True)
        ]

    def _count_changes(self) -> list[int]:
        return [bucket.grad_data._version for bucket in self.buckets]

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Begins to gather the parameters, and waits for the end unless `overlap_param_gather` is on.

        Args:
            force_sync: True to wait in any case, and only that if a gather is running.

        Raises:
            GradientError: the optimizer is not sharded, a gather is running, or the group has no means to communicate.
            CollectiveError: the gather failed.
        """
        self._check_sharded("start_param_sync")
        if self.param_gather_handle is not None:
            if not force_sync:
                raise GradientError(
                    f"bucket {self.buckets[0].bucket_id}: finish_param_sync() must be called before another "
                    "start_param_sync(), but a gather is running"
                )
            self.wait_for_params()
            return
        buffers = [bucket.param_data for bucket in self.buckets if bucket.param_data is not None]
        work = self._connected().all_gather(buffers, label=self.label)
        self._observe("all-gather", buffers, work)
        self.param_gather_dispatched = True
        self.param_gather_handle = work
        if force_sync or not self.ddp_config.overlap_param_gather:
            self.wait_for_params()
        elif self.is_gathered_by_step and self._num_ranks > 1:
            # Counted once the gather has begun: writes of the optimizer before it are in what is sent.
            self._param_versions = [param._version for param in self._params]

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Waits until the parameters are gathered, which begins here if it has not yet, and begins the next gather.

        Args:
            skip_next_bucket_dispatch: True to leave `next_param_gather_bucket_group` alone.

        Raises:
            GradientError: the optimizer is not sharded, or `overlap_param_gather` is off.
            CollectiveError: the gather failed.
        """
        self._check_sharded("finish_param_sync")
        if not self.ddp_config.overlap_param_gather:
            raise GradientError(
                "finish_param_sync() must be called with overlap_param_gather=True only, but that is False"
            )
        if not self.param_gather_dispatched:
            self.start_param_sync()
        if self.param_gather_handle is None:
            return
        self.wait_for_params()
        following = self.next_param_gather_bucket_group
        if following is None or skip_next_bucket_dispatch:
            return
        if following.param_gather_dispatched:
            warnings.warn(
                f"bucket {following.buckets[0].bucket_id}: its parameters must be gathered after those of bucket "
                f"{self.buckets[0].bucket_id}, but their gather has already begun: parameters that are registered in "
                "another order than the forward pass needs them are gathered with less overlap",
                stacklevel=2,
            )
        else:
            following.start_param_sync()

    def wait_for_params(self) -> None:
        """Waits for a gather that is running, if any.

        Raises:
            GradientError: a parameter was written meanwhile, which the gather may have overwritten.
            CollectiveError: the gather failed.
        """
        if self.param_gather_handle is None:
            # Not over for every stream: one that reads the parameters first, as an evaluation beside the training, must
            # not take the wait away from the others.
            if self.gathered is not None:
                self.gathered.wait()
            return
        self.waiter.wait(self.param_gather_handle, self._describe("gather of parameters"))
        self.param_gather_handle = None
        self.gathered = StreamsThatWaited() if self._is_on_gpu else None
        before, self._param_versions = self._param_versions, None
        for slot, version in enumerate(before or ()):
            if self._params[slot]._version != version:
                raise GradientError(
                    f"rank {self.collectives.rank()}: parameters must stay as they are while they are gathered, but "
                    f"{self._name(slot)} was written through an old reference, and what was written may be lost: call "
                    "wait_for_params() of the wrapper first, or take the parameter from its module"
                )

    def _note_old_params(self) -> None:
        """Has the next forward pass gather the parameters, unless the optimizer's step does."""
        self.param_gather_dispatched = self.is_gathered_by_step

    def _is_reduced(self) -> bool:
        return self.is_issued and self.grad_reduce_handle is None and not self._has_instances

    def _connected(self) -> Collectives:
        """Collectives of all ranks of the group."""
        if self.collectives.size() != self._num_ranks:
            raise GradientError(
                f"bucket {self.buckets[0].bucket_id}: its group of {self._num_ranks} ranks must be a process group of "
                "torch, or be connected by DistributedDataParallel, but is neither"
            )
        return self.collectives

    def _reduce(self, *, force_all_reduce: bool) -> Work:
        buffers = [bucket.grad_data for bucket in self.buckets]
        scale = self._common_scale()
        average = self.ddp_config.average_in_collective
        is_scatter = self._is_sharded and not force_all_reduce
        collectives = self._connected()
        if self.torch_collectives is not None and (force_all_reduce or is_replaced()):
            collectives = self.torch_collectives
        operation = collectives.reduce_scatter if is_scatter else collectives.all_reduce
        work = operation(buffers, scale=scale, average=average, label=self.label)
        self._observe("reduce-scatter" if is_scatter else "all-reduce", buffers, work)
        return work

    def _reduce_over_instances(self, *, force_all_reduce: bool) -> None:
        """Reduces within this instance of the optimizer, then this rank's shards over all instances."""
        with self._on_stream():
            what = self._describe("reduction of gradients")
            # The reduction between instances reads the shards that this one writes.
            self.waiter.wait(self._reduce(force_all_reduce=force_all_reduce), what)
            size, rank = self.intra_distributed_optimizer_instance_size, self.intra_distributed_optimizer_instance_rank
            shards = [shard_of(bucket.grad_data, rank, size) for bucket in self.buckets]
            average = self.ddp_config.average_in_collective
            between = TorchCollectives(self.inter_distributed_optimizer_instance_group)
            work = between.all_reduce(shards, scale=1.0, average=average, label=self.label)
            self.waiter.wait(work, what)

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Runs operations on the stream for communication, after the gradients are there; on the CPU, at once."""
        stream = self.communication_stream
        if stream is None or not self.ddp_config.overlap_grad_reduce:
            return nullcontext()
        # The last kernels of the backward pass may still write gradients on the current stream.
        stream.wait_stream(torch.cuda.current_stream())
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def _common_scale(self) -> float:
        """Factor of all buckets. Where they differ, scales each and returns 1."""
        scales = {bucket.gradient_scaling_factor for bucket in self.buckets}
        if len(scales) == 1:
            return scales.pop()
        for bucket in self.buckets:
            bucket.grad_data *= bucket.gradient_scaling_factor
        return 1.0

    def _drain(self) -> None:
        """Waits for a reduction that is running. Its error is raised again by the next operation."""
        if self.grad_reduce_handle is not None:
            what = self._describe("reduction of gradients")
            try:
                self.waiter.wait(self.grad_reduce_handle, what)
            except Exception as error:  # noqa: BLE001  the next operation raises it
                logger.warning("%s failed while it was dropped: %s", what, error)
        self.grad_reduce_handle = None
        self._versions = None

    def _observe(self, kind: str, buffers: Sequence[torch.Tensor], work: Work) -> None:
        if self.observer is not None:
            num_bytes = sum(buffer.nbytes for buffer in buffers)
            self.observer.issued(self.label, kind, num_bytes, self.collectives.size(), work)

    def _check_sharded(self, method: str) -> None:
        if not self._is_sharded:
            raise GradientError(
                f"{method}() must be called with use_distributed_optimizer=True only, but that is False"
            )

    def _name(self, slot: int) -> str:
        param = self._params[slot]
        return self.param_to_bucket[param].names.get(param, f"a parameter of shape {list(param.shape)}")

    def _describe(self, what: str) -> str:
        step = f" in step {self.label.step}" if self.label.step else ""
        return f"{what} of bucket {self.buckets[0].bucket_id}{step}"
