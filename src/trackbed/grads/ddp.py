"""Wrapper that averages the gradients of a model over data-parallel ranks."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cancellation import checking_waits
from trackbed.comm import Group
from trackbed.errors import ArgumentError, GradientError
from trackbed.grads.agreement import agree, describe_buffers, describe_frozen, describe_options, describe_orders
from trackbed.grads.automatic_reduction import AutomaticReduction, PassState
from trackbed.grads.bucket_group import _ParamAndGradBucketGroup
from trackbed.grads.buffer import _ParamAndGradBuffer
from trackbed.grads.collectives import Collectives, Label, SharedMemoryCollectives, TorchCollectives
from trackbed.grads.collectives.protocol import AGREED, EXCHANGES, LEFT, MAX_NUMBERS, NO_LABEL
from trackbed.grads.config import DistributedDataParallelConfig
from trackbed.grads.hooks import backward_hook, hooks_around_states, register_backward_hook
from trackbed.grads.initial_values import broadcast_values, compare_values, is_dense, values_of
from trackbed.grads.issue_order import IssueOrder
from trackbed.grads.memory_order import turned_like
from trackbed.grads.observer import BucketObserver
from trackbed.grads.optimizer_hook import watch_steps
from trackbed.grads.options import check_options, with_bucket_size
from trackbed.grads.outer_state import add_metadata_of_module, restore_names
from trackbed.grads.ownership import check_unclaimed, claim
from trackbed.grads.param_gather import HookedModule, ParameterGather, remove_hooks
from trackbed.grads.parameters import (
    check_supported,
    check_taken_over,
    check_unchanged,
    drop_gradients,
    is_expert,
    scaling_factors,
)
from trackbed.grads.part import Part
from trackbed.grads.process_groups import ProcessGroups, messages_of
from trackbed.grads.separate_memory import check_separate
from trackbed.grads.step_check import StepCheck
from trackbed.grads.unused import lacked_by_all
from trackbed.grads.waiting import Waiter
from trackbed.plural import number_of

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(torch.nn.Module):
    """Wraps a model so that its gradients are averaged over data-parallel ranks, in contiguous buffers.

    `model = DistributedDataParallel(module, DistributedDataParallelConfig(overlap_grad_reduce=True))`. Code that was
    written for Megatron Core passes `(config, ddp_config, module)`.

    Each parameter that requires a gradient gets an attribute `main_grad`, which is a view of a buffer. Backward passes
    add their gradients to it. The buffers are cut into buckets, which are reduced during the last backward pass
    (`overlap_grad_reduce`) or in `finish_grad_sync()`. With `use_distributed_optimizer` each rank receives one shard of
    the reduced gradients, and updates the same shard of the parameters. The updated parameters are gathered on all
    ranks in `start_param_sync()` or during the next forward pass.

    A training step is `optimizer.zero_grad()`, backward passes, all but the last in `no_sync()`, and `optimizer.step()`
    of a `DataParallelOptimizer`. With an optimizer of Megatron Core it is `zero_grad_buffer()`, backward passes,
    `finish_grad_sync()`, and the optimizer's step.

    The constructor is collective over the ranks. It checks that all ranks have the same names, shapes and types of
    parameters and buffers, and the same options, and gives all ranks the values of rank 0. In code for Megatron Core it
    neither checks buffers nor copies values; `broadcast_params()` does the latter.

    Args:
        config: the model, as `module` in the first place. In code for Megatron Core, its configuration or None; the
            model is then the third argument.
        ddp_config: options, which are copied; None for `DistributedDataParallelConfig()`.
        module: model, with its parameters on one device, if it is not the first argument.
        disable_bucketing: True for one bucket.
        pg_collection: Megatron Core's `ProcessGroupCollection`, instead of the two arguments that follow.
        process_group: process group of torch, or `trackbed.comm.Group`, of the data-parallel ranks; None for all ranks
            of `torch.distributed`, or for this process if it is the only one.
        expert_process_group: ranks with the same experts, that is, those parameters whose attribute `allreduce` is
            False; None for `process_group`.
        allow_unused: True to allow missing gradients, which count as zeros where another rank has one; otherwise they
            are an error with `overlap_grad_reduce`. A `DataParallelOptimizer` leaves a parameter alone for which no
            rank has one, but not in code for Megatron Core.
        observer: receives the events of buckets, such as `Timeline()`.
        broadcast: False to compare the values of all ranks, by digests, instead of copying those of rank 0. Of experts,
            the ranks of `expert_process_group` have the same. Not for Megatron Core's arguments.

    Attributes:
        module: the model.
        ddp_config: its options.
        dp_group: data-parallel ranks, with `rank()` and `size()`.

    Raises:
        ArgumentError: an option is not supported or contradicts another, or a parameter cannot lie in a buffer.
        CollectiveError: a rank failed, or ranks differ; the message names the rank, and the first parameter or option.
    """

    @overload
    def __init__(
        self,
        module: torch.nn.Module,
        /,
        ddp_config: DistributedDataParallelConfig | None = None,
        *,
        disable_bucketing: bool = False,
        process_group: torch.distributed.ProcessGroup | Group | None = None,
        expert_process_group: torch.distributed.ProcessGroup | Group | None = None,
        allow_unused: bool = False,
        observer: BucketObserver | None = None,
        broadcast: bool = True,
    ) -> None: ...

    @overload
    def __init__(
        self,
        config: object,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,  # noqa: FBT001, FBT002  Megatron Core's signature
        pg_collection: Any = None,
        *,
        process_group: torch.distributed.ProcessGroup | Group | None = None,
        expert_process_group: torch.distributed.ProcessGroup | Group | None = None,
        allow_unused: bool = False,
        observer: BucketObserver | None = None,
    ) -> None: ...

    def __init__(
        self,
        config: Any = None,
        ddp_config: DistributedDataParallelConfig | None = None,
        module: torch.nn.Module | None = None,
        disable_bucketing: bool = False,  # noqa: FBT001, FBT002  Megatron Core's signature
        pg_collection: Any = None,
        *,
        process_group: torch.distributed.ProcessGroup | Group | None = None,
        expert_process_group: torch.distributed.ProcessGroup | Group | None = None,
        allow_unused: bool = False,
        observer: BucketObserver | None = None,
        broadcast: bool | None = None,
    ) -> None:
        """Wraps a model; the class describes the arguments."""
        is_megatrons_form = not isinstance(config, torch.nn.Module)
        if not is_megatrons_form:
            config, module = None, _only_model(config, module)
        ddp_config = DistributedDataParallelConfig() if ddp_config is None else ddp_config
        self._init_module(config)
        self.allow_unused = allow_unused
        self._set_groups(self._process_groups(pg_collection, ddp_config, process_group, expert_process_group))
        self._messages = self._expert_messages = messages_of(self.dp_cp_group)
        self.waiter = Waiter(self._messages)
        with self._messages.guarded("DistributedDataParallel"):
            check_options(ddp_config)
            self.module = _checked_module(config if module is None else module)
            self.ddp_config = with_bucket_size(ddp_config, self.dp_group.size())
            is_one_bucket = disable_bucketing or _rank_of(self.pp_group) > 0
            self.bucket_size = None if is_one_bucket else self.ddp_config.bucket_size
            self._build_parts(is_one_group=disable_bucketing)
            more = {} if is_megatrons_form else {"broadcast": broadcast is not False}
            self._agree_and_connect(more | {"one bucket": is_one_bucket}, compares_buffers=not is_megatrons_form)
            if not is_megatrons_form:
                self._make_same(broadcasts=broadcast is not False)
            elif broadcast is not None:
                msg = "broadcast must be left out with the arguments of Megatron Core, but is given: broadcast_params()"
                raise ArgumentError(msg)
        self._leaves_unused_alone = not is_megatrons_form and ddp_config.num_distributed_optimizer_instances == 1
        self._is_finished = False
        self._is_used = [False]
        """True, in a list that hooks share, from an optimizer's step until `zero_grad_buffer`."""
        self.is_released = False
        """True if another wrapper has taken the model over."""
        self._has_run = False
        self._order_groups(observer)
        self._no_sync_depth = 0
        self._pass = PassState(is_on=not is_megatrons_form and self._has_gradients_of_torch())
        self._automatic = self._new_automatic_reduction() if self._pass.is_on else None
        self._forces_all_reduce = [False]
        self._is_touched = [False]
        """True, in a list that hooks share, if the model has run or gradients that groups do not count may have arrived
        since `zero_grad_buffer`."""
        if self.ddp_config.use_distributed_optimizer:
            _drop_weight_tensors(self.module)
        self.grad_accs = [
            register_backward_hook(
                param,
                self._decorate_hook(
                    backward_hook(
                        param,
                        self.param_to_bucket_group[param],
                        state=self._pass,
                        is_touched=self._is_touched,
                        is_used=self._is_used,
                        forces_all_reduce=self._forces_all_reduce,
                    )
                ),
                self.module,
                delays_wgrad=self.ddp_config.delay_wgrad_compute,
            )
            for param in self.params_with_grad
        ]
        if self.use_forward_hook:
            self.enable_forward_pre_hook()
        self._optimizer: weakref.ref[Any] | None = None
        self.is_updating = False
        """True while a `DataParallelOptimizer` calls its optimizer of torch."""
        if not is_megatrons_form:
            watch_steps(self, ((param, param) for param in self.params_with_grad))
        self._state_hooks = hooks_around_states(self.module, self)
        handles = [*self.grad_accs, *self._state_hooks]
        weakref.finalize(self, _remove_hooks, handles, self._gather.hooked).atexit = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the model.

        Raises:
            GradientError: the model was wrapped again.
        """
        if self.is_released:
            self._order.check_usable()
        self._has_run = True
        if torch.is_grad_enabled():
            # Its backward pass may fail before any gradient arrives: the step counts all the same.
            self._is_touched[0] = True
            if self._automatic is not None:
                self._automatic.forget_failed_pass()
                outputs = self.module(*inputs, **kwargs)
                self._automatic.watch(outputs)
                return outputs
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Adds up gradients in the block, and reduces no bucket. Blocks may be nested."""
        self._no_sync_depth += 1
        self._is_touched[0] = True
        self._set_last_microbatch(is_last=False)
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            self._set_last_microbatch(is_last=self._no_sync_depth == 0)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Collective over the ranks: runs a training loop, in which a failure of one rank is raised on every rank.

        A rank that waits for a bucket notices that another rank has failed, and raises an error with the number and the
        message of that rank. An exception that is caught inside the block is not a failure; the next step is then
        either correct or refused. After a failure all further steps are refused. All ranks must take the same number of
        steps in the block.

        Raises:
            CollectiveError: a rank failed, or gave no sign of life for the timeout of the process group.
        """
        with self._guarded("training", "a failure has ended guarded()"):
            yield
            self._leave()

    def start_grad_sync(self, *unused: Any) -> None:  # noqa: ARG002  Megatron Core's schedules pass the parameters
        """Begins to reduce all gradients; without `overlap_grad_reduce`, waits for the end.

        Raises:
            GradientError: a gradient is NaN or infinite and that is checked, or the step before was given up halfway.
            CollectiveError: another rank failed.
        """
        if self._automatic is not None:
            self._automatic.reduce_rest()
            return
        self._order.issue_rest(force_all_reduce=False)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:  # noqa: FBT001, FBT002
        """Waits until all gradients are reduced, which begins here if it has not yet.

        Args:
            force_all_reduce: True for all-reduces even where the optimizer is sharded.

        Raises:
            GradientError: a gradient is missing with `overlap_grad_reduce` and without `allow_unused`, was changed
                while it was being reduced, or is NaN or infinite and that is checked; or `zero_grad_buffer()` was not
                called since the last time.
            CollectiveError: another rank failed.
        """
        self._order.check_usable()
        if self._automatic is not None:
            self._automatic.reduce_rest()
            return
        if self._is_finished:
            msg = (
                f"rank {self._rank}: zero_grad_buffer(), or the optimizer's zero_grad(), must be called before another "
                "finish_grad_sync(), but was not"
            )
            raise GradientError(msg)
        if self.ddp_config.overlap_grad_reduce:
            self._order.check_untouched()
            if not self.allow_unused:
                for group in self._order.unissued():
                    self._check_missing(group.missing(), group.buckets[0].bucket_id)
        self._order.issue_rest(force_all_reduce=bool(force_all_reduce))
        self._order.finish(self.waiter)
        self._is_finished = True

    def zero_grad_buffer(self) -> None:
        """Sets all gradients to zero, after reductions that are still running have ended."""
        self._automatic, self._pass.is_on = None, False
        if getattr(self.config, "cuda_graph_impl", "none") != "transformer_engine":  # such graphs set it only once
            for param in self.params_with_grad:
                param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        drop_gradients(self.params_with_grad)
        self._order.reset(has_begun=self._is_touched[0])
        for buffer in self._buffers_of_parts():
            buffer.reset()
        self._is_touched[0] = self._no_sync_depth > 0
        self._is_finished = False
        self._is_used[0] = False
        if self._no_sync_depth:
            self._set_last_microbatch(is_last=False)

    def agree(self, flag: bool) -> bool:  # noqa: FBT001  the one thing that is agreed on
        """Collective over the ranks: returns True on every rank if `flag` is true on any of them.

        For what ranks see at different steps, such as a signal to stop: one that saves while another one trains would
        wait for it. One exchange, in each step in which it is called.

        Args:
            flag: what this rank has seen.

        Raises:
            CollectiveError: another rank failed, or is at another operation.
        """
        return bool(self.exchange(np.array([bool(flag)], dtype=np.int64), AGREED).any())

    def exchange(
        self, numbers: npt.NDArray[np.int64], label: Label = NO_LABEL, collectives: Collectives | None = None
    ) -> npt.NDArray[np.int64]:
        """Collective over the ranks that share one optimizer: each rank sends a few numbers to all others.

        Args:
            numbers: `[K]` at most 32 numbers. K is the same on every rank.
            label: name of the operation, the same on all ranks.
            collectives: collectives of other ranks, such as those with the same experts.

        Returns:
            `[ranks, K]` numbers of all ranks.

        Raises:
            ArgumentError: there are more than 32.
            CollectiveError: another rank failed, or is at another operation.
        """
        if len(numbers) > MAX_NUMBERS:
            msg = f"numbers must be at most {MAX_NUMBERS}, but are {len(numbers)}"
            raise ArgumentError(msg)
        exchange = (collectives or self.dense_collectives).exchange(numbers, label=label)
        self.waiter.wait(exchange.work, EXCHANGES.get(label, "exchange of numbers"))
        return exchange.read()

    def lacking_gradients(self, *, of_experts: bool) -> list[int]:
        """Numbers of the parameters without a gradient on this rank since `zero_grad_buffer`, for `unused_params`.

        With the arguments of Megatron Core none is: missing gradients are zeros there.

        Args:
            of_experts: True for the parameters of experts, False for all others.
        """
        return (self._experts if of_experts else self._dense).lacking() if self._leaves_unused_alone else []

    def unused_params(
        self, lacking: list[int], counts: npt.NDArray[np.int64], *, of_experts: bool
    ) -> list[torch.nn.Parameter]:
        """Collective over the ranks if each of them lacks a gradient: parameters for which no rank has one.

        Args:
            lacking: result of `lacking_gradients`.
            counts: `[ranks]` length of this result on each rank.
            of_experts: True for the parameters of experts, and the ranks that share them.
        """
        part = self._experts if of_experts else self._dense
        exchange = partial(self.exchange, collectives=part.collectives)
        return [part.params[number] for number in lacked_by_all(lacking, counts, len(part.params), exchange)]

    def gather_lines(self, lines: list[str], *, of_experts: bool = False) -> list[tuple[int, list[str]]]:
        """Collective over the ranks that share one optimizer: returns number and lines of text of each.

        Args:
            lines: lines of this rank.
            of_experts: True for the ranks with the same experts.
        """
        messages = self._expert_messages if of_experts else self._messages
        return [(rank, own) for rank, own in messages.all_gather([self._rank, lines])]

    def attach_optimizer(self, optimizer: Any) -> None:
        """Has an optimizer take over from any other one, which from then on refuses to step.

        Args:
            optimizer: object with a method `note_model_params`, called whenever parameters were replaced by
                `broadcast_params` or by a state that was loaded. Its steps call `start_param_sync`.
        """
        if self._automatic is not None:
            self._is_finished, found = self._automatic.leave()
            self._automatic = None
            for param in found:
                group = self.param_to_bucket_group[param]
                group.has_arrived[group.slot_of(param)] = True
        self._optimizer = weakref.ref(optimizer)
        for group in self._groups():
            group.is_gathered_by_step = True
            group.counts_written = self._leaves_unused_alone

    def unseen_gradient(self, param: torch.nn.Parameter) -> str | None:
        """Error text for a step of torch's that finds None in `grad` of a parameter.

        Returns:
            The text, which names the parameter and the remedy; None if no gradient of it has arrived, or the step is
            that of a `DataParallelOptimizer`.
        """
        group = self.param_to_bucket_group[param]
        if self.is_updating or self.is_released or not group.has_arrived[group.slot_of(param)]:
            return None
        name = group.param_to_bucket[param].names[param]
        where = f"rank {self._rank}: gradients must be in grad, but that of {name} is in main_grad alone, "
        if self._attached() is not None:
            return where + "so nothing would be trained: call step() of the DataParallelOptimizer instead"
        return where + (
            "so nothing would be trained: build trackbed.DataParallelOptimizer(optimizer, model) and call its step(); "
            "torch's optimizers alone take gradients that are whole (use_distributed_optimizer=False), of the "
            "parameters' type, and never set to zero by zero_grad_buffer()"
        )

    def take_gradients(self, optimizer: Any) -> None:
        """Collective over the ranks: finishes the gradients, for an optimizer that is about to use and change them.

        Raises:
            GradientError: see `finish_grad_sync`; or gradients were used already, another optimizer is attached, or the
                parameters are no longer those that were wrapped.
            CollectiveError: another rank failed.
        """
        self.check_attached(optimizer)
        if self._is_used[0]:
            msg = f"rank {self._rank}: zero_grad() must be called before another step(), but was not"
            raise GradientError(msg)
        self.check_unchanged()
        check_taken_over(self._buffers_of_parts(), self._rank)
        if not self._is_finished:
            self.finish_grad_sync()
        self._is_used[0] = True

    def check_attached(self, optimizer: Any) -> None:
        """Checks that an optimizer is the last one that took over.

        Raises:
            GradientError: it is not.
        """
        if self._attached() is not optimizer:
            msg = (
                f"rank {self._rank}: the optimizer must be the last one of the model, but is another: give several of "
                "torch as a list, DataParallelOptimizer([one, other], model)"
            )
            raise GradientError(msg)

    def check_unchanged(self) -> None:
        """Checks that this wrapper has the model, and that the parameters are those that were wrapped.

        Raises:
            GradientError: a parameter is another one, which the message names; or the model was wrapped again.
        """
        if self.is_released:
            self._order.check_usable()
        check_unchanged(self.module, self.param_to_bucket_group, self._buffers_of_parts(), self._rank)

    def _attached(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    def note_change(self) -> None:
        """Tells the optimizer that parameters were replaced."""
        optimizer = self._attached()
        if optimizer is not None:
            optimizer.note_model_params()

    def has_begun(self) -> bool:
        """True if the wrapper was used: it has run, or gradients have arrived."""
        return self._has_run or self._is_touched[0] or self._order.has_begun()

    def release(self, param: torch.nn.Parameter) -> None:
        """Lets go of the model, of which another wrapper takes over a parameter."""
        if self.is_released:
            return
        self._gather.wait()
        _remove_hooks([*self.grad_accs, *self._state_hooks], self._gather.hooked)
        group = self.param_to_bucket_group[param]
        self._order.give_up(
            f"its model was wrapped again: {group.param_to_bucket[param].names[param]} is in another "
            "DistributedDataParallel now",
            "which must be used in the place of this one, with a new optimizer",
        )
        self.is_released = True

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies all gradients by a factor, once reductions that are running have ended."""
        self._order.check_untouched()
        for group in self._groups():
            group.wait_for_grads()
        for buffer in self._buffers_of_parts():
            buffer.scale_gradients(scaling_factor)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:  # noqa: ARG002
        """Begins to gather all parameters; without `overlap_param_gather`, waits for the end.

        Args:
            unused: ignored; Megatron Core's schedules pass the parameters.
            force_sync: True to wait in any case, also for gathers that are running.
            force_dispatch: True to begin even if `overlap_param_gather_with_optimizer_step` is set.

        Raises:
            GradientError: the optimizer is not sharded, or a gather is running and `force_sync` is False.
            CollectiveError: another rank failed.
        """
        if self.overlap_param_gather_with_optimizer_step and not (force_sync or force_dispatch):
            return
        self._gather.start(force_sync=force_sync)

    def enable_forward_pre_hook(self) -> None:
        """Registers hooks with which each module waits for its parameters before it runs.

        Raises:
            GradientError: parameters are not gathered during the forward pass, or the hooks are there.
        """
        self._gather.enable_hooks(self.module, self.param_to_bucket_group, self._decorate_hook)

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:  # noqa: FBT001, FBT002  Megatron's signature
        """Removes the hooks.

        Args:
            param_sync: True to gather all parameters first.

        Raises:
            GradientError: parameters are not gathered during the forward pass, or the hooks are not there.
            CollectiveError: another rank failed.
        """
        self._gather.disable_hooks()
        if param_sync:
            self.start_param_sync(force_sync=True)

    def broadcast_params(self) -> None:
        """Collective over the ranks: replaces all parameters by those of the first rank.

        Raises:
            CollectiveError: a rank failed.
        """
        with self._guarded("broadcast_params", "broadcast_params() has failed"):
            self.wait_for_params()
            for of_experts, collectives in ((False, self.dense_collectives), (True, self.expert_collectives)):
                broadcast_values(values_of(self.module, of_experts=of_experts).params, collectives, self.waiter)
            self.note_change()

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:  # noqa: FBT001, FBT002
        """Frees the memory of the gradients, which are lost. They must not be used before `restore_grad_buffers`.

        Args:
            synchronize: True to wait for the GPU first.
            empty_cache: True to give the memory back to the GPU.
        """
        if synchronize and torch.cuda.is_available():
            torch.cuda.synchronize()
        for buffer in self._buffers_of_parts():
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        if empty_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:  # noqa: FBT001, FBT002  Megatron's signature
        """Takes memory for the gradients again; they are zero.

        Args:
            synchronize: True to wait for the GPU afterwards.
        """
        for buffer in self._buffers_of_parts():
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        if synchronize and torch.cuda.is_available():
            torch.cuda.synchronize()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of the model, with the names of the model. Waits for parameters that are being gathered."""
        self.wait_for_params()
        state = self.module.state_dict(*args, **kwargs)
        add_metadata_of_module(state, kwargs.get("prefix", ""))
        return state

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:  # noqa: FBT001, FBT002
        """State of the model for a checkpoint, as Megatron Core's modules give it."""
        self.wait_for_params()
        return self.module.state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)  # type: ignore[operator]

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002  torch's signature
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Copies a state with the names of the model into the parameters.

        Raises:
            ArgumentError: `assign` would replace the parameters, which have to stay in the buffers.
        """
        if assign:
            msg = "assign must be False, because parameters have to stay in the buffers, but is True"
            raise ArgumentError(msg)
        self.wait_for_params()
        return self.module.load_state_dict(state_dict, strict=strict)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *others: Any
    ) -> None:
        """Loads a part of the state of a module around the wrapper, in which names are those of `state_dict`.

        Raises:
            ArgumentError: `assign` would replace the parameters.
        """
        if local_metadata.get("assign_to_params_buffers"):
            msg = "assign must be False, because parameters have to stay in the buffers, but is True"
            raise ArgumentError(msg)
        self.wait_for_params()
        restore_names(state_dict, prefix, self.module.state_dict().keys())
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be copied or pickled: process groups and memory of other ranks cannot be.

        Raises:
            ArgumentError: always.
        """
        msg = (
            "DistributedDataParallel must not be copied or pickled, because other ranks take part in it: copy or save "
            "its module, or the state_dict() of that"
        )
        raise ArgumentError(msg)

    def _init_module(self, config: Any) -> None:
        """Initialises the base class."""
        torch.nn.Module.__init__(self)
        self.config = config

    def _process_groups(
        self,
        pg_collection: Any,
        ddp_config: DistributedDataParallelConfig,
        process_group: Any,
        expert_process_group: Any,
    ) -> ProcessGroups:
        if pg_collection is None:
            return ProcessGroups.of(process_group, expert_process_group)
        has_instances = ddp_config.num_distributed_optimizer_instances > 1
        return ProcessGroups.of_collection(pg_collection, has_instances=has_instances)

    def _set_groups(self, groups: ProcessGroups) -> None:
        self.dp_group = groups.dp_group
        self.dp_cp_group = groups.dp_cp_group
        self.intra_dp_cp_group = groups.intra_dp_cp_group
        self.expt_dp_group = groups.expt_dp_group
        self.intra_expt_dp_group = groups.intra_expt_dp_group
        self.tp_group = groups.tp_group
        self.pp_group = groups.pp_group
        self.ep_group = groups.ep_group
        self.inter_dist_opt_group = groups.inter_dist_opt_group
        self._rank = groups.dp_cp_group.rank()

    def _build_parts(self, *, is_one_group: bool) -> None:
        """Moves the parameters to buffers."""
        named = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        check_supported(named)
        is_sharded = self.ddp_config.use_distributed_optimizer
        apart = [(name, param) for name, param in named if is_sharded or param.itemsize < torch.float32.itemsize]
        separate = {param for _, param in apart}
        others = [(name, param) for name, param in self.module.named_parameters() if param not in separate]
        check_separate(apart, [*others, *self.module.named_buffers()])
        names = {param: name for name, param in named}
        self.params_with_grad = [param for _, param in named]
        check_unclaimed(named, self.module.parameters())
        claim(self.params_with_grad, self)
        for param in self.params_with_grad:
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        drop_gradients(self.params_with_grad)
        factors = scaling_factors(
            self.config,
            self.ddp_config,
            num_ranks=self.dp_cp_group.size(),
            num_expert_ranks=self.expt_dp_group.size(),
        )
        self._dense, self._experts = (
            Part.allocate(
                [param for param in self.params_with_grad if is_expert(param) == wants_experts],
                names,
                self.ddp_config,
                ranks,
                factor=factor,
                bucket_size=self.bucket_size,
                is_one_group=is_one_group,
                instances=self.inter_dist_opt_group,
            )
            for wants_experts, ranks, factor in (
                (False, self.intra_dp_cp_group, factors.dense),
                (True, self.intra_expt_dp_group, factors.expert),
            )
        )
        self.buffers: list[_ParamAndGradBuffer]  # type: ignore[assignment]  # Megatron Core's name hides torch's method
        self.buffers, self.bucket_groups = self._dense.buffers, self._dense.groups
        self.expert_parallel_buffers, self.expert_parallel_bucket_groups = self._experts.buffers, self._experts.groups
        self.param_to_bucket_group = {param: group for group in self._groups() for param in group.params}

    def _agree_and_connect(self, options: dict[str, bool], *, compares_buffers: bool) -> None:
        """Checks that the ranks have the same model and options, and chooses their collectives."""
        more = {"allow_unused": self.allow_unused, **options}
        if self.expt_dp_group is not self.dp_cp_group:
            self._expert_messages = messages_of(self.expt_dp_group)
        named = list(self.module.named_parameters())
        dense = describe_buffers(self.buffers) + describe_frozen((n, p) for n, p in named if not is_expert(p))
        of_experts = describe_buffers(self.expert_parallel_buffers)
        of_experts += describe_frozen((n, p) for n, p in named if is_expert(p))
        if compares_buffers:
            dense += values_of(self.module, of_experts=False).describe_buffers()
            of_experts += values_of(self.module, of_experts=True).describe_buffers()
        takes_orders = compares_buffers and not self.ddp_config.use_distributed_optimizer
        must_have_same_orders = takes_orders and self._has_gradients_of_torch()  # autograd decides them there
        for lines, wants_experts, messages in (
            (describe_options(self.ddp_config, **more) + dense, False, self._messages),
            (of_experts, True, self._expert_messages),
        ):
            params = [(n, p) for n, p in named if takes_orders and p.requires_grad and is_expert(p) == wants_experts]
            orders = describe_orders(params)
            checked, compared = (lines + orders, []) if must_have_same_orders else (lines, orders)
            if agree(messages, checked, may_differ=compared):
                for _, param in params:
                    param.main_grad = turned_like(param, param.main_grad.view(-1))  # type: ignore[attr-defined]
        for part, ranks, messages in (
            (self._dense, self.dp_cp_group, self._messages),
            (self._experts, self.expt_dp_group, self._expert_messages),
        ):
            part.connect(messages if part.ranks is ranks else messages_of(part.ranks), self.ddp_config)

    @torch.no_grad()
    def _make_same(self, *, broadcasts: bool) -> None:
        """Collective over the ranks: gives all ranks the values of rank 0, or checks that they have them."""
        for of_experts, collectives, messages in (
            (False, self.dense_collectives, self._messages),
            (True, self.expert_collectives, self._expert_messages),
        ):
            values = values_of(self.module, of_experts=of_experts)
            if broadcasts:
                broadcast_values(values, collectives, self.waiter)
                others = [(name, value) for name, value in values if not is_dense(value)]
                if others:
                    compare_values(others, messages)
            else:
                compare_values(list(values), messages)

    @property
    def overlap_param_gather_with_optimizer_step(self) -> bool:
        """True if the optimizer begins the gathers of parameters itself, while it steps."""
        return self._gather.is_begun_by_optimizer

    @overlap_param_gather_with_optimizer_step.setter
    def overlap_param_gather_with_optimizer_step(self, value: bool) -> None:
        self._gather.is_begun_by_optimizer = value

    @property
    def force_all_reduce(self) -> bool:
        """True to reduce by all-reduces even where the optimizer is sharded."""
        return self._forces_all_reduce[0]

    @force_all_reduce.setter
    def force_all_reduce(self, value: bool) -> None:
        self._forces_all_reduce[0] = value

    @property
    def dense_collectives(self) -> Collectives:
        """Collectives of all parameters but those of experts."""
        return self._dense.collectives

    @property
    def expert_collectives(self) -> Collectives:
        """Collectives of the parameters of experts."""
        return self._experts.collectives

    def _groups(self) -> list[_ParamAndGradBucketGroup]:
        return self._dense.groups + self._experts.groups

    def _buffers_of_parts(self) -> list[_ParamAndGradBuffer]:
        return self._dense.buffers + self._experts.buffers

    def _order_groups(self, observer: BucketObserver | None) -> None:
        """Numbers the groups in the order in which their last gradient is expected: that of their first parameter."""
        positions = {param: position for position, param in enumerate(self.params_with_grad)}
        groups = sorted(self._groups(), key=lambda group: -min(positions[param] for param in group.params))
        carries_label = not isinstance(self.dense_collectives, TorchCollectives)
        check = None if carries_label else StepCheck(self.dense_collectives)
        self._order = IssueOrder(groups, rank=self._rank, num_ranks=self.dp_cp_group.size(), check=check)
        self.use_forward_hook = self.ddp_config.use_distributed_optimizer and self.ddp_config.overlap_param_gather
        self._gather = ParameterGather(
            groups[::-1],
            is_overlapped=self.use_forward_hook,
            begins_next=not self.ddp_config.align_param_gather,
        )
        self.waiter.observer = observer
        # All ranks have the same dense operations; those of experts differ where their groups do.
        self.waiter.num_issued = self.dense_collectives.num_issued
        for number, group in enumerate(groups):
            group.label = Label(0, number)
            group.waiter = self.waiter
            group.observer = observer
            group.issue = self._order.issue_of(number)

    def _decorate_hook(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Makes the function that is registered from a hook of autograd or of a module."""
        return hook

    def wait_for_params(self) -> None:
        """Waits for parameters that are being gathered."""
        self._gather.wait()

    def _has_gradients_of_torch(self) -> bool:
        """True if gradients lie in the buffers as torch's optimizers take them: whole, in the type of the parameter.

        They must be averages, too: a gradient to which further passes add is reduced again with them.
        """
        config = self.ddp_config
        has_averages = not self.expert_parallel_buffers or self.expt_dp_group.size() == self.dp_cp_group.size()
        return (
            not config.use_distributed_optimizer
            and not config.delay_wgrad_compute
            and has_averages
            and all(buffer.grad_dtype == buffer.param_dtype for buffer in self._buffers_of_parts())
        )

    def _new_automatic_reduction(self) -> AutomaticReduction:
        is_missing_allowed = self.allow_unused or not self.ddp_config.overlap_grad_reduce
        return AutomaticReduction(
            self.params_with_grad,
            self._pass,
            pending=self._pending_params,
            reduce=self._reduce_pass,
            finish=lambda: self._order.finish(self.waiter),
            restart=self._restart_pass,
            check=lambda: check_unchanged(self.module, self.param_to_bucket_group, (), self._rank),
            exchange=self.exchange if is_missing_allowed else None,
        )

    def _pending_params(self) -> set[torch.nn.Parameter]:
        """Parameters of the bucket groups that have not been issued."""
        return {param for group in self._order.unissued() for param in group.params}

    def _reduce_pass(self, missing: list[torch.nn.Parameter]) -> None:
        """Issues the bucket groups that have not been, at the end of a backward pass.

        Args:
            missing: parameters of these groups without a gradient.
        """
        self._order.check_usable()
        if self.ddp_config.overlap_grad_reduce:
            self._order.check_untouched()
            if not self.allow_unused:
                buckets = [(self.param_to_bucket_group[param].param_to_bucket[param], param) for param in missing]
                names = [bucket.names[param] for bucket, param in buckets if param.requires_grad]
                self._check_missing(names, buckets[0][0].bucket_id if buckets else 0)
        self._order.issue_rest(force_all_reduce=False)

    def _restart_pass(self) -> None:
        """Prepares the next backward pass, to which gradients that are there belong, too."""
        self._order.reset(has_begun=True)
        self._set_last_microbatch(is_last=self._no_sync_depth == 0)

    def _check_missing(self, missing: list[str], bucket_id: int) -> None:
        if missing:
            more = f" and {number_of(len(missing) - 1, 'other')} have" if len(missing) > 1 else " has"
            msg = (
                f"rank {self._rank}: all parameters must have a gradient before finish_grad_sync(), but {missing[0]} "
                f"in bucket {bucket_id}{more} none from a backward pass outside no_sync(): pass allow_unused=True to "
                "DistributedDataParallel to train without it"
            )
            raise GradientError(msg)

    def _set_last_microbatch(self, *, is_last: bool) -> None:
        self._pass.reduces = is_last
        for group in self._groups():
            group.is_last_microbatch = is_last

    def _leave(self) -> None:
        """Tells the other ranks that this one has left the training loop, and checks that they have too."""
        self.wait_for_params()
        check = StepCheck(self.dense_collectives)
        check.begin(LEFT)
        check.finish(self.waiter, "the end of guarded() (every rank must have entered it)")

    @property
    def remove_forward_pre_hook_handles(self) -> dict[torch.nn.Module, Any]:
        """Handles of the hooks with which modules wait for their parameters."""
        return self._gather.handles

    @contextlib.contextmanager
    def _guarded(self, what: str, refusal: str) -> Iterator[None]:
        """Runs a block in which a failure of one rank is raised on all.

        Args:
            what: description of the block, with which an error begins.
            refusal: reason why no further step is possible after a failure.
        """
        guarded = self._messages.guarded(what, max_heartbeat_gap_seconds=float("inf"))
        # A save or load in the block waits over a group of its own, and looks at this step.
        counts = {self.waiter.domain: self.waiter.num_issued}
        with (
            guarded as step,
            self.waiter.inside(step),
            checking_waits(step.check),
            step.watching_waits(counts),
        ):
            try:
                yield
            except BaseException:
                self._give_up(refusal)
                raise

    def _give_up(self, reason: str) -> None:
        """Refuses further steps, and ends operations that are running, for which other ranks may not come."""
        self._order.give_up(reason)
        for collectives in (self.dense_collectives, self.expert_collectives):
            if isinstance(collectives, SharedMemoryCollectives):
                collectives.stop(reason)


def _only_model(first: torch.nn.Module, module: object) -> torch.nn.Module:
    if module is not None:
        msg = "the model must be given once, as the first argument or as module, but both are given"
        raise ArgumentError(msg)
    return first


def _checked_module(module: object) -> torch.nn.Module:
    if not isinstance(module, torch.nn.Module) or isinstance(module, DistributedDataParallel):
        msg = f"module must be a torch.nn.Module that is not wrapped, but is of {type(module).__name__}"
        raise ArgumentError(msg)
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        msg = "module must not be wrapped already, but is in torch's DistributedDataParallel: give its attribute module"
        raise ArgumentError(msg)
    _check_parts(module)
    return module


def _check_parts(module: torch.nn.Module) -> None:
    """Checks that no part of a model that is trained is wrapped already, by a wrapper that still has it.

    Raises:
        ArgumentError: one is; the message has its name.
    """
    for name, part in module.named_modules():
        of_torch = isinstance(part, torch.nn.parallel.DistributedDataParallel)
        if not of_torch and not (isinstance(part, DistributedDataParallel) and not part.is_released):
            continue
        if any(param.requires_grad for param in part.parameters()):
            whose = "torch's" if of_torch else "Trackbed's"
            msg = (
                f"module: no part of it may be wrapped already, but {name} is in {whose} DistributedDataParallel: put "
                f"{name}.module in its place, and wrap the whole alone"
            )
            raise ArgumentError(msg)


def _remove_hooks(handles: list[Any], hooked: list[HookedModule]) -> None:
    """Removes the hooks of a wrapper. Does not wait, because garbage is collected on any thread."""
    for handle in handles:
        if handle is not None:
            handle.remove()
    remove_hooks(hooked)


def _rank_of(group: Any) -> int:
    """This process's rank in a process group, or in the first of several."""
    return int((group[0] if isinstance(group, list) else group).rank())


@torch.no_grad()
def _drop_weight_tensors(module: torch.nn.Module) -> None:
    """Drops further references to weights that Transformer Engine keeps, so that their old memory is freed."""
    for part in module.modules():
        if hasattr(part, "weight_tensor"):
            part.weight_tensor = None  # type: ignore[assignment]
