"""Engine of a wrapped model: the reductions and gathers that its wrapper and its optimizer share."""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trackbed.cancellation import checking_waits
from trackbed.comm.difference import packed, unpacked
from trackbed.errors import ArgumentError, GradientError
from trackbed.grads.automatic_reduction import AutomaticReduction, PassState, lacked_by_all
from trackbed.grads.collectives import Collectives, Label, SharedMemoryCollectives, TorchCollectives
from trackbed.grads.collectives.protocol import (
    EXCHANGES,
    LEFT,
    MAX_NUMBERS,
    NO_LABEL,
    NORM,
    BackendError,
    read_together,
)
from trackbed.grads.config import ReductionOptions
from trackbed.grads.failure_aware_wait import GROUP_IS_LOST, end_stuck, freed_from_failures
from trackbed.grads.gradient_check import FiniteCheck
from trackbed.grads.hooks import backward_hook, hooks_around_states, register_backward_hook, watch_steps
from trackbed.grads.issue_order import IssueOrder, StepCheck
from trackbed.grads.model_agreement import ProcessGroups, broadcast_values, values_of
from trackbed.grads.param_gather import HookedModule, ParameterGather, remove_hooks
from trackbed.grads.parameter_set import (
    check_taken_over,
    check_unchanged,
    drop_gradients,
)
from trackbed.grads.timeline import BucketObserver, Timeline
from trackbed.grads.wrapped_model import WrappedModel
from trackbed.plural import number_of

Parameter = torch.nn.Parameter


class GradientEngine(WrappedModel):
    """Reduces the gradients of a model and gathers its parameters, for its wrapper and its optimizer.

    A step of an optimizer is `take_gradients`, an `exchange` of the sums of which the norm is made, the update, and,
    where the optimizer is sharded, `start_param_sync`.

    The constructor is collective over the ranks: see `DistributedDataParallel`, which has the same arguments.

    Args:
        module: model.
        config: options.
        groups: ranks of the dense parameters, and of the experts' parameters.
        disable_bucketing: True for one bucket.
        allow_unused: True to allow missing gradients.
        observer: receives the events of buckets.
        broadcast: True to copy the values of rank 0, False to compare those of all ranks.
    """

    follows_torch: ClassVar[bool] = True
    """True if torch's optimizers may step on the gradients, and a parameter that no rank has used is left alone."""

    def __init__(
        self,
        module: object,
        config: ReductionOptions,
        groups: ProcessGroups,
        *,
        disable_bucketing: bool = False,
        allow_unused: bool = False,
        observer: BucketObserver | None = None,
        broadcast: bool = True,
    ) -> None:
        super().__init__(
            module,
            config,
            groups,
            disable_bucketing=disable_bucketing,
            allow_unused=allow_unused,
            broadcast=broadcast,
        )
        self.is_released = False
        self.is_updating = False
        """True while a `DataParallelOptimizer` calls its optimizer of torch."""
        self._optimizer: weakref.ref[Any] | None = None
        self._finite_check: FiniteCheck | None = None
        self._has_run = False
        self._is_finished = False
        self._no_sync_depth = 0
        self._order_groups(observer)
        self.state = PassState(is_on=self.follows_torch and self._has_gradients_of_torch())
        self.automatic = self._new_automatic_reduction() if self.state.is_on else None
        if self.config.use_distributed_optimizer:
            _drop_weight_tensors(self.module)
        self.handles = [self._register_hook(param) for param in self.params]
        if self.gathers_ahead:
            self.enable_forward_hooks()
        if self.follows_torch:
            watch_steps(self, ((param, param) for param in self.params))
        self._state_hooks = hooks_around_states(self.module, self)
        handles = [*self.handles, *self._state_hooks]
        weakref.finalize(self, _remove_hooks, handles, self.gather.hooked).atexit = False

    def begin_forward(self) -> AutomaticReduction | None:
        """Prepares a forward pass. Returns what is to watch its outputs, if gradients are reduced automatically."""
        if self.is_released:
            self.order.check_usable()
        self._has_run = True
        if not torch.is_grad_enabled():
            return None
        # Its backward pass may fail before any gradient arrives: the step counts all the same.
        self.state.is_touched = True
        if self.automatic is not None:
            self.automatic.forget_failed_pass()
        return self.automatic

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds up gradients in the block, and reduces no bucket. Blocks may be nested."""
        self._no_sync_depth += 1
        self.state.is_touched = True
        self._set_last_microbatch(is_last=False)
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            self._set_last_microbatch(is_last=self._no_sync_depth == 0)

    def zero_gradients(self) -> None:
        """Sets all gradients to zero, after reductions that are still running have ended."""
        self.automatic, self.state.is_on = None, False
        self._reset_fused_flags()
        drop_gradients(self.params)
        if self._finite_check is not None:
            self._finite_check.forget()
        self.order.reset(has_begun=self.state.is_touched)
        for buffer in self.buffers():
            buffer.reset()
        self.state.is_touched = self._no_sync_depth > 0
        self._is_finished = False
        self.state.is_used = False
        if self._no_sync_depth:
            self._set_last_microbatch(is_last=False)

    def finish_gradients(self, *, force_all_reduce: bool = False) -> None:
        """Collective over the ranks: waits until all gradients are reduced, which begins here if it has not yet.

        Args:
            force_all_reduce: True for all-reduces even where the optimizer is sharded.

        Raises:
            GradientError: see `DistributedDataParallel.finish_grad_sync`.
            CollectiveError: another rank failed.
        """
        self.order.check_usable()
        if self.automatic is not None:
            self.automatic.reduce_rest()
            return
        if self._is_finished:
            raise GradientError(
                f"rank {self.rank}: zero_grad_buffer(), or the optimizer's zero_grad(), must be called before another "
                "finish_grad_sync(), but was not"
            )
        if self.config.overlap_grad_reduce:
            self.order.check_untouched()
            if not self.allow_unused:
                for group in self.order.unissued():
                    self._check_missing(group.missing(), group.buckets[0].bucket_id)
        self.order.issue_rest(force_all_reduce=force_all_reduce)
        self.order.finish(self.waiter, is_step_next=self._attached() is not None and bool(self._on_gpus()))
        self._is_finished = True

    def exchange(
        self, numbers: npt.NDArray[np.int64], label: Label = NO_LABEL, collectives: Collectives | None = None
    ) -> npt.NDArray[np.int64]:
        """Collective over the ranks that share one optimizer: each rank sends a few numbers to all others.

        Args:
            numbers: `[K]` at most 32 numbers. K is the same on every rank.
            label: name of the operation, the same on all ranks.
            collectives: collectives of other ranks, such as the ranks with the same experts.

        Returns:
            `[ranks, K]` numbers of all ranks.

        Raises:
            ArgumentError: there are more than 32.
            CollectiveError: another rank failed, or is at another operation.
        """
        if len(numbers) > MAX_NUMBERS:
            raise ArgumentError(f"numbers must be at most {MAX_NUMBERS}, but are {len(numbers)}")
        exchange = (collectives or self.dense_collectives).exchange(numbers, label=label)
        self.waiter.wait(exchange.work, EXCHANGES.get(label, "exchange of numbers"))
        return exchange.read(self.waiter.read)

    def exchange_update(
        self, known: Mapping[bool, npt.NDArray[np.int64]], on_device: Mapping[bool, torch.Tensor]
    ) -> dict[bool, npt.NDArray[np.int64]]:
        """Collective over the ranks that share one optimizer: sends what they must agree on and know for an update.

        A GPU is waited for once, for all that the host needs of the step: these numbers, the labels of the step that
        `finish_gradients` has left, and the first gradient of each rank that is not finite.

        Args:
            known: `[K]` numbers for the ranks of the dense parameters under False, and for those of the experts' under
                True, if there are any.
            on_device: `[M]` int64 numbers for the same ranks, on the device of the gradients.

        Returns:
            `[ranks, K + M]` numbers of the same ranks.

        Raises:
            CollectiveError: another rank failed, or is at another operation.
            NonFiniteGradientError: a rank had such a gradient, and `check_for_nan_in_grad` is on.
        """
        check, parts = self._finite_check, (self.dense, self.experts)
        sent = dict(on_device)
        if check is not None:
            sent[False] = torch.cat([check.take(sent[False].device), sent[False]])
        exchanges = [
            parts[of_experts].collectives.exchange(numbers, label=NORM, more=sent[of_experts])
            for of_experts, numbers in known.items()
        ]
        for exchange in exchanges:
            self.waiter.wait(exchange.work, EXCHANGES[NORM])
        before = self.order.take_check()
        found = read_together([*before, *exchanges], self.waiter.read)[len(before) :]
        rows = dict(zip(known, found, strict=True))
        if check is not None:
            place = len(known[False])
            check.check(rows[False][:, place].tolist())
            rows[False] = np.delete(rows[False], place, axis=1)
        return rows

    def lacking_gradients(self, *, of_experts: bool) -> list[int]:
        """Numbers of the parameters without a gradient on this rank since `zero_gradients`, for `unused_params`.

        None where missing gradients count as zeros.

        Args:
            of_experts: True for the parameters of experts, False for all others.
        """
        return (self.experts if of_experts else self.dense).lacking() if self.follows_torch else []

    def unused_params(self, lacking: list[int], counts: npt.NDArray[np.int64], *, of_experts: bool) -> list[Parameter]:
        """Collective over the ranks if each of them lacks a gradient: parameters for which no rank has one.

        Args:
            lacking: result of `lacking_gradients`.
            counts: `[ranks]` length of this result on each rank.
            of_experts: True for the parameters of experts, and the ranks that share them.
        """
        part = self.experts if of_experts else self.dense
        exchange = partial(self.exchange, collectives=part.collectives)
        return [part.params[number] for number in lacked_by_all(lacking, counts, len(part.params), exchange)]

    def gather_lines(
        self, lines: list[str], ranks: Collection[int], *, of_experts: bool = False
    ) -> dict[int, list[str]]:
        """Collective over the ranks that share one optimizer: returns lines of text of some of them.

        Args:
            lines: lines of this rank.
            ranks: numbers of the ranks that send theirs, among all or among the ranks with the same experts.
            of_experts: True for the ranks with the same experts.

        Returns:
            Lines of these ranks, by number among all ranks.
        """
        messages = self.expert_messages if of_experts else self.messages
        sent = messages.all_gather([self.rank, packed(lines)] if messages.rank in ranks else None)
        return {found[0]: unpacked(found[1]) for found in sent if found is not None}

    def attach(self, optimizer: Any) -> None:
        """Has an optimizer take over from any other one, which from then on refuses to step.

        Args:
            optimizer: object with a method `note_model_params`, called whenever parameters were replaced by
                `broadcast_params` or by a state that was loaded. Its steps call `start_param_sync`.
        """
        if self.automatic is not None:
            self._is_finished, with_gradient = self.automatic.leave()
            self.automatic = None
            for param in with_gradient:
                group = self.group_of[param]
                group.has_arrived[group.slot_of(param)] = True
        self._optimizer = weakref.ref(optimizer)
        self._finite_check = self._new_finite_check()
        for group in self.groups():
            group.finite_check = self._finite_check
            group.is_gathered_by_step = True
            group.counts_written = self.follows_torch

    def take_gradients(self, optimizer: Any) -> None:
        """Collective over the ranks: finishes the gradients, for an optimizer that is about to use and change them.

        Raises:
            GradientError: see `finish_gradients`; or gradients were used already, another optimizer is attached, or the
                parameters are no longer those that were wrapped.
            CollectiveError: another rank failed.
        """
        self.check_attached(optimizer)
        if self.state.is_used:
            raise GradientError(f"rank {self.rank}: zero_grad() must be called before another step(), but was not")
        self.check_unchanged()
        check_taken_over(self.buffers(), self.rank)
        if not self._is_finished:
            self.finish_gradients()
        self.state.is_used = True

    @contextlib.contextmanager
    def agreed_update(self) -> Iterator[None]:
        """In the block, on which all ranks have agreed, an exception refuses all further steps."""
        try:
            yield
        except BaseException:
            if self.ranks.size() > 1:
                # Other ranks may have finished theirs, so that the parameters differ.
                self._give_up("a step has failed in the update of the parameters, which other ranks may have finished")
            raise

    def check_attached(self, optimizer: Any) -> None:
        """Checks that an optimizer is the last one that took over.

        Raises:
            GradientError: it is not.
        """
        if self._attached() is not optimizer:
            raise GradientError(
                f"rank {self.rank}: the optimizer must be the last one of the model, but is another: give several of "
                "torch as a list, DataParallelOptimizer([one, other], model)"
            )

    def check_unchanged(self) -> None:
        """Checks that this engine has the model, and that the parameters are those that were wrapped.

        Raises:
            GradientError: a parameter is another one, which the message names; or the model was wrapped again.
        """
        if self.is_released:
            self.order.check_usable()
        check_unchanged(self.module, self.group_of, self.buffers(), self.rank)

    def unseen_gradient(self, param: Parameter) -> str | None:
        """Error text for a step of torch's that finds None in `grad` of a parameter.

        Returns:
            The text, which names the parameter and the remedy; None if no gradient of it has arrived, or the step is
            that of a `DataParallelOptimizer`.
        """
        group = self.group_of[param]
        if self.is_updating or self.is_released or not group.has_arrived[group.slot_of(param)]:
            return None
        name = group.param_to_bucket[param].names[param]
        where = f"rank {self.rank}: gradients must be in grad, but that of {name} is in main_grad alone, "
        if self._attached() is not None:
            return where + "so nothing would be trained: call step() of the DataParallelOptimizer instead"
        return where + (
            "so nothing would be trained: build trackbed.DataParallelOptimizer(optimizer, model) and call its step(); "
            "torch's optimizers alone take gradients that are whole (use_distributed_optimizer=False), of the "
            "parameters' type, and never set to zero by zero_grad_buffer()"
        )

    def note_change(self) -> None:
        """Tells the optimizer that parameters were replaced."""
        optimizer = self._attached()
        if optimizer is not None:
            optimizer.note_model_params()

    def has_begun(self) -> bool:
        """True if the wrapper was used: it has run, or gradients have arrived."""
        return self._has_run or self.state.is_touched or self.order.has_begun()

    def release(self, param: Parameter) -> None:
        """Lets go of the model, of which another wrapper takes over a parameter."""
        if self.is_released:
            return
        self.gather.wait()
        _remove_hooks([*self.handles, *self._state_hooks], self.gather.hooked)
        group = self.group_of[param]
        self.order.give_up(
            f"its model was wrapped again: {group.param_to_bucket[param].names[param]} is in another "
            "DistributedDataParallel now",
            "which must be used in the place of this one, with a new optimizer",
        )
        self.is_released = True

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Begins to gather all parameters; without `overlap_param_gather`, waits for the end.

        Args:
            force_sync: True to wait in any case, also for gathers that are running.

        Raises:
            GradientError: the optimizer is not sharded, or a gather is running and `force_sync` is False.
            CollectiveError: another rank failed.
        """
        self.gather.start(force_sync=force_sync)

    def wait_for_params(self) -> None:
        """Waits for parameters that are being gathered."""
        self.gather.wait()

    def enable_forward_hooks(self) -> None:
        """Registers hooks with which each module waits for its parameters before it runs.

        Raises:
            GradientError: parameters are not gathered during the forward pass, or the hooks are there.
        """
        self.gather.enable_hooks(self.module, self.group_of, self._decorate_hook)

    def broadcast_params(self) -> None:
        """Collective over the ranks: replaces all parameters by those of the first rank.

        Raises:
            CollectiveError: a rank failed.
        """
        with self.guarded("broadcast_params", "broadcast_params() has failed"):
            self.wait_for_params()
            for of_experts, collectives in ((False, self.dense_collectives), (True, self.expert_collectives)):
                broadcast_values(values_of(self.module, of_experts=of_experts).params, collectives, self.waiter)
            self.note_change()

    @contextlib.contextmanager
    def guarded(self, what: str, refusal: str, *, is_aborted: bool = True) -> Iterator[None]:
        """Runs a block in which a failure of one rank is raised on all.

        Args:
            what: description of the block, with which an error begins.
            refusal: reason why no further step is possible after a failure.
            is_aborted: True to end operations on GPUs that never would, after a failure.
        """
        on_gpus = self._on_gpus() if is_aborted else []
        guarded = self.messages.guarded(what, max_heartbeat_gap_seconds=float("inf"))
        # A save or load in the block waits over a group of its own, and looks at this step.
        counts = {self.waiter.domain: self.waiter.num_issued}
        try:
            with (
                guarded as step,
                self.waiter.inside(step),
                checking_waits(step.check),
                step.watching_waits(counts),
                freed_from_failures(on_gpus, step.check, self.messages),
            ):
                try:
                    yield
                except BaseException as error:
                    self._give_up(refusal)
                    end_stuck(on_gpus)
                    if isinstance(error, dist.DistError | BackendError):  # as of NCCL, once a rank is gone
                        self.waiter.raise_cause(what, error)
                    raise
        except BaseException as error:
            if any(collectives.is_ended for collectives in on_gpus):
                error.add_note(GROUP_IS_LOST)
            raise

    def leave(self) -> None:
        """Tells the other ranks that this one has left the training loop, and checks that they have too."""
        self.wait_for_params()
        check = StepCheck(self.dense_collectives)
        check.begin(LEFT)
        check.finish(self.waiter, "the end of guarded() (every rank must have entered it)")

    def _order_groups(self, observer: BucketObserver | None) -> None:
        """Numbers the groups in the order in which their last gradient is expected: that of their first parameter."""
        positions = {param: position for position, param in enumerate(self.params)}
        groups = sorted(self.groups(), key=lambda group: -min(positions[param] for param in group.params))
        carries_label = not isinstance(self.dense_collectives, TorchCollectives)
        check = None if carries_label else StepCheck(self.dense_collectives)
        self.order = IssueOrder(groups, rank=self.rank, num_ranks=self.ranks.size(), check=check)
        self.gathers_ahead = self.config.use_distributed_optimizer and self.config.overlap_param_gather
        self.gather = ParameterGather(
            groups[::-1],
            is_overlapped=self.gathers_ahead,
            begins_next=not self.config.align_param_gather,
        )
        if isinstance(observer, Timeline) and self._on_gpus():
            raise ArgumentError(
                "observer: a Timeline must watch operations that the host waits for, but those of NCCL are queued on a "
                "GPU, so that their times are not known: use torch.profiler"
            )
        self.waiter.observer = observer
        if check is not None:
            self.waiter.look = check.look
        # All ranks have the same dense operations; those of experts differ where their groups do.
        self.waiter.num_issued = self.dense_collectives.num_issued
        for number, group in enumerate(groups):
            group.label = Label(0, number)
            group.waiter = self.waiter
            group.learns_from_dropped_steps = not self.follows_torch
            group.observer = observer
            group.issue = self.order.issue_of(number)

    def _register_hook(self, param: Parameter) -> object | None:
        hook = self._decorate_hook(backward_hook(param, self.group_of[param], self.state))
        return register_backward_hook(param, hook, self.module, delays_wgrad=self.config.delay_wgrad_compute)

    def _decorate_hook(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Makes the function that is registered from a hook of autograd or of a module."""
        return hook

    def _reset_fused_flags(self) -> None:
        """Forgets which gradients kernels have added to `main_grad`."""
        for param in self.params:
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def _new_automatic_reduction(self) -> AutomaticReduction:
        is_missing_allowed = self.allow_unused or not self.config.overlap_grad_reduce
        return AutomaticReduction(
            self.params,
            self.state,
            pending=self._pending_params,
            reduce=self._reduce_pass,
            finish=lambda: self.order.finish(self.waiter),
            restart=self._restart_pass,
            check=lambda: check_unchanged(self.module, self.group_of, (), self.rank),
            exchange=self.exchange if is_missing_allowed else None,
        )

    def _pending_params(self) -> set[Parameter]:
        """Parameters of the bucket groups that have not been issued."""
        return {param for group in self.order.unissued() for param in group.params}

    def _reduce_pass(self, missing: list[Parameter]) -> None:
        """Issues the bucket groups that have not been, at the end of a backward pass.

        Args:
            missing: parameters of these groups without a gradient.
        """
        self.order.check_usable()
        if self.config.overlap_grad_reduce:
            self.order.check_untouched()
            if not self.allow_unused:
                buckets = [(self.group_of[param].param_to_bucket[param], param) for param in missing]
                names = [bucket.names[param] for bucket, param in buckets if param.requires_grad]
                self._check_missing(names, buckets[0][0].bucket_id if buckets else 0)
        self.order.issue_rest(force_all_reduce=False)

    def _restart_pass(self) -> None:
        """Prepares the next backward pass, to which gradients that are there belong, too."""
        self.order.reset(has_begun=True)
        self._set_last_microbatch(is_last=self._no_sync_depth == 0)

    def _check_missing(self, missing: list[str], bucket_id: int) -> None:
        if missing:
            more = f" and {number_of(len(missing) - 1, 'other')} have" if len(missing) > 1 else " has"
            raise GradientError(
                f"rank {self.rank}: all parameters must have a gradient before finish_grad_sync(), but {missing[0]} "
                f"in bucket {bucket_id}{more} none from a backward pass outside no_sync(): pass allow_unused=True to "
                "DistributedDataParallel to train without it"
            )

    def _set_last_microbatch(self, *, is_last: bool) -> None:
        self.state.reduces = is_last
        for group in self.groups():
            group.is_last_microbatch = is_last

    def _attached(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    def _new_finite_check(self) -> FiniteCheck | None:
        """Check of gradients that is read with the numbers of a step; None where each bucket is checked at once."""
        is_wanted = self.config.check_for_nan_in_grad and self._is_on_gpu()
        if not is_wanted:
            return None
        has_same = [label == self.expert_groups[self.rank] for label in self.expert_groups]
        return FiniteCheck([one for group in self.groups() for one in group.buckets], self.experts.params, has_same)

    def _is_on_gpu(self) -> bool:
        return any(buffer.grad_data.is_cuda for buffer in self.buffers())

    def _give_up(self, reason: str) -> None:
        """Refuses further steps, and ends operations that are running, for which other ranks may not come."""
        self.order.give_up(reason)
        for collectives in (self.dense_collectives, self.expert_collectives):
            if isinstance(collectives, SharedMemoryCollectives):
                collectives.stop(reason)

    def _on_gpus(self) -> list[TorchCollectives]:
        """Collectives whose operations are queued on a GPU."""
        found = (self.dense_collectives, self.expert_collectives)
        return [one for one in found if isinstance(one, TorchCollectives) and one.is_queued()]


def _remove_hooks(handles: list[Any], hooked: list[HookedModule]) -> None:
    """Removes the hooks of a wrapper. Does not wait, because garbage is collected on any thread."""
    for handle in handles:
        if handle is not None:
            handle.remove()
    remove_hooks(hooked)


@torch.no_grad()
def _drop_weight_tensors(module: torch.nn.Module) -> None:
    """Drops further references to weights that Transformer Engine keeps, so that their old memory is freed."""
    for part in module.modules():
        if hasattr(part, "weight_tensor"):
            part.weight_tensor = None  # type: ignore[assignment]
