"""`DistributedDataParallel` as Megatron Core's programs expect it: a module of Megatron Core, on its process groups."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trackbed.comm import Group
from trackbed.errors import GradientError
from trackbed.grads.collectives.protocol import TOKENS
from trackbed.grads.config import ReductionOptions, with_bucket_size
from trackbed.grads.ddp import DistributedDataParallel as DataParallel
from trackbed.grads.engine import GradientEngine
from trackbed.grads.model_agreement import ProcessGroups
from trackbed.grads.parameter_set import ScalingFactors
from trackbed.grads.timeline import BucketObserver
from trackbed.megatron import rerun as _rerun  # which begins to ask the rerun state machine
from trackbed.megatron.ddp_config import DistributedDataParallelConfig, MegatronGroups, check_options

del _rerun

if TYPE_CHECKING:
    MegatronModule = torch.nn.Module
else:
    MegatronModule = torch.nn.Module
    if "megatron.core" in sys.modules:  # which imports this module, after `install`
        with contextlib.suppress(ModuleNotFoundError):  # Megatron Core is not installed
            from megatron.core.transformer.module import MegatronModule


class MegatronEngine(GradientEngine):
    """Engine of a model under the rules of Megatron Core's programs.

    Gradients are added to `main_grad` alone, and missing ones are zeros. The constructor neither compares buffers nor
    copies values, as Megatron Core's programs call `broadcast_params`.

    Args:
        module: model.
        ddp_config: options.
        groups: process groups.
        config: Megatron Core's configuration of the model; None for none.
        disable_bucketing: True for one bucket.
        allow_unused: True to allow missing gradients with `overlap_grad_reduce`.
        observer: receives the events of buckets.
    """

    follows_torch = False

    def __init__(
        self,
        module: object,
        ddp_config: DistributedDataParallelConfig,
        groups: MegatronGroups,
        config: Any,
        *,
        disable_bucketing: bool,
        allow_unused: bool,
        observer: BucketObserver | None,
    ) -> None:
        self._named_groups = groups
        self._model_config = config
        super().__init__(
            module,
            ddp_config,
            ProcessGroups(groups.dp_cp_group, groups.expt_dp_group),
            disable_bucketing=disable_bucketing,
            allow_unused=allow_unused,
            observer=observer,
        )

    def start_param_sync(self, *, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Begins to gather all parameters, unless the optimizer does; see `DistributedDataParallel`."""
        if self.gather.is_begun_by_optimizer and not (force_sync or force_dispatch):
            return
        super().start_param_sync(force_sync=force_sync)

    def _check_config(self, config: object) -> None:
        check_options(config)

    def _with_bucket_size(self, config: ReductionOptions) -> ReductionOptions:
        return with_bucket_size(config, self._named_groups.dp_group.size())

    def _has_one_bucket(self, *, disable_bucketing: bool) -> bool:
        return disable_bucketing or _rank_of(self._named_groups.pp_group) > 0

    def _scaling_factors(self) -> ScalingFactors:
        if not getattr(self._model_config, "calculate_per_token_loss", False):
            return super()._scaling_factors()
        # Gradients are summed, and `finalize_model_grads` divides them by the number of tokens.
        if self.config.average_in_collective:
            raise GradientError("average_in_collective must be False with calculate_per_token_loss, but is True")
        return ScalingFactors(1.0, 1.0)

    def _shards(self) -> tuple[Any, Any]:
        return self._named_groups.intra_dp_cp_group, self._named_groups.intra_expt_dp_group

    def _build_parts(self, *, is_one_group: bool) -> None:
        super()._build_parts(is_one_group=is_one_group)
        if self.config.num_distributed_optimizer_instances == 1:
            return
        for groups in (self.dense.groups, self.experts.groups):
            stream = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
            for group in groups:
                group.inter_distributed_optimizer_instance_group = self._named_groups.inter_dist_opt_group
                group.communication_stream = stream

    def _described_options(self) -> dict[str, bool]:
        return {"one bucket": self.is_one_bucket}

    def _described_values(self, *, of_experts: bool) -> list[str]:
        return []

    def _takes_orders(self) -> bool:
        return False

    def _make_same(self) -> None:
        """Leaves the values to the program."""

    def _decorate_hook(self, hook: Callable[..., None]) -> Callable[..., None]:
        return _unless_capturing(hook)

    def _reset_fused_flags(self) -> None:
        if getattr(self._model_config, "cuda_graph_impl", "none") != "transformer_engine":  # such graphs set it once
            super()._reset_fused_flags()


class DistributedDataParallel(DataParallel, MegatronModule):
    """Wraps a model, with Megatron Core's arguments, attributes and methods; see `trackbed.DistributedDataParallel`.

    A training step with an optimizer of Megatron Core is `zero_grad_buffer()`, backward passes, `finish_grad_sync()`,
    and the optimizer's step. The constructor neither checks buffers nor copies values; `broadcast_params()` does the
    latter.

    Process groups come from `pg_collection` or, without it, from Megatron Core's `parallel_state`; only where that has
    not been initialised, all ranks are data-parallel.

    Args:
        config: Megatron Core's configuration of the model; None for none.
        ddp_config: options, which are copied; None for `DistributedDataParallelConfig()`.
        module: model, with its parameters on one device.
        disable_bucketing: True for one bucket.
        pg_collection: Megatron Core's `ProcessGroupCollection`, instead of the two arguments that follow.
        process_group: process group of torch, or `trackbed.comm.Group`, of the data-parallel ranks.
        expert_process_group: ranks with the same experts; None for `process_group`.
        allow_unused: True to allow missing gradients, which are an error with `overlap_grad_reduce` otherwise.
        observer: receives the events of buckets, such as `trackbed.grads.Timeline()`.

    Raises:
        ArgumentError: an option is not supported or contradicts another, or a parameter cannot lie in a buffer.
        CollectiveError: a rank failed, or ranks differ; the message names the rank, and the first parameter or option.
    """

    engine: MegatronEngine

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig | None,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        *,
        process_group: torch.distributed.ProcessGroup | Group | None = None,
        expert_process_group: torch.distributed.ProcessGroup | Group | None = None,
        allow_unused: bool = False,
        observer: BucketObserver | None = None,
    ) -> None:
        if MegatronModule is torch.nn.Module:
            torch.nn.Module.__init__(self)
            self.config = config
        else:
            MegatronModule.__init__(self, config=config)
        ddp_config = DistributedDataParallelConfig() if ddp_config is None else ddp_config
        groups = _groups_of(config, ddp_config, pg_collection, process_group, expert_process_group)
        engine = MegatronEngine(
            module,
            ddp_config,
            groups,
            config,
            disable_bucketing=disable_bucketing,
            allow_unused=allow_unused,
            observer=observer,
        )
        self._set_engine(engine)
        self._set_groups(groups)
        self.bucket_size = None if engine.is_one_bucket else engine.config.bucket_size
        self.params_with_grad = engine.params
        self.param_to_bucket_group = engine.group_of
        self.buffers = engine.dense.buffers  # type: ignore[assignment]  # Megatron Core's name hides torch's method
        self.bucket_groups = engine.dense.groups
        self.expert_parallel_buffers = engine.experts.buffers
        self.expert_parallel_bucket_groups = engine.experts.groups
        self.grad_accs = engine.handles
        self.use_forward_hook = engine.gathers_ahead

    def _set_groups(self, groups: MegatronGroups) -> None:
        self.dp_group = groups.dp_group
        self.dp_cp_group = groups.dp_cp_group
        self.intra_dp_cp_group = groups.intra_dp_cp_group
        self.expt_dp_group = groups.expt_dp_group
        self.intra_expt_dp_group = groups.intra_expt_dp_group
        self.tp_group = groups.tp_group
        self.pp_group = groups.pp_group
        self.ep_group = groups.ep_group
        self.inter_dist_opt_group = groups.inter_dist_opt_group

    def start_grad_sync(self, *unused: Any) -> None:
        """Begins to reduce all gradients; without `overlap_grad_reduce`, waits for the end.

        Raises:
            GradientError: a gradient is NaN or infinite and that is checked, or the step before was given up halfway.
            CollectiveError: another rank failed.
        """
        self.engine.order.issue_rest(force_all_reduce=False)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Waits until all gradients are reduced, which begins here if it has not yet.

        Args:
            force_all_reduce: True for all-reduces even where the optimizer is sharded.

        Raises:
            GradientError: see `trackbed.DistributedDataParallel.finish_grad_sync`.
            CollectiveError: another rank failed.
        """
        self.engine.finish_gradients(force_all_reduce=bool(force_all_reduce))

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies all gradients by a factor, once reductions that are running have ended."""
        self.engine.order.check_untouched()
        for group in self.engine.groups():
            group.wait_for_grads()
        for buffer in self.engine.buffers():
            buffer.scale_gradients(scaling_factor)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Begins to gather all parameters; without `overlap_param_gather`, waits for the end.

        Args:
            unused: ignored; Megatron Core's schedules pass the parameters.
            force_sync: True to wait in any case, also for gathers that are running.
            force_dispatch: True to begin even if `overlap_param_gather_with_optimizer_step` is set.

        Raises:
            GradientError: the optimizer is not sharded, or a gather is running and `force_sync` is False.
            CollectiveError: another rank failed.
        """
        self.engine.start_param_sync(force_sync=force_sync, force_dispatch=force_dispatch)

    def enable_forward_pre_hook(self) -> None:
        """Registers hooks with which each module waits for its parameters before it runs.

        Raises:
            GradientError: parameters are not gathered during the forward pass, or the hooks are there.
        """
        self.engine.enable_forward_hooks()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Removes the hooks.

        Args:
            param_sync: True to gather all parameters first.

        Raises:
            GradientError: parameters are not gathered during the forward pass, or the hooks are not there.
            CollectiveError: another rank failed.
        """
        self.engine.gather.disable_hooks()
        if param_sync:
            self.start_param_sync(force_sync=True)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Frees the memory of the gradients, which are lost. They must not be used before `restore_grad_buffers`.

        Args:
            synchronize: True to wait for the GPU first.
            empty_cache: True to give the memory back to the GPU.
        """
        if synchronize and torch.cuda.is_available():
            torch.cuda.synchronize()
        for buffer in self.engine.buffers():
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        if empty_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Takes memory for the gradients again; they are zero.

        Args:
            synchronize: True to wait for the GPU afterwards.
        """
        for buffer in self.engine.buffers():
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        if synchronize and torch.cuda.is_available():
            torch.cuda.synchronize()

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """State of the model for a checkpoint, as Megatron Core's modules give it."""
        self.wait_for_params()
        return self.module.state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)  # type: ignore[operator]

    @property
    def remove_forward_pre_hook_handles(self) -> dict[torch.nn.Module, Any]:
        """Handles of the hooks with which modules wait for their parameters."""
        return self.engine.gather.handles

    @property
    def overlap_param_gather_with_optimizer_step(self) -> bool:
        """True if the optimizer begins the gathers of parameters itself, while it steps."""
        return self.engine.gather.is_begun_by_optimizer

    @overlap_param_gather_with_optimizer_step.setter
    def overlap_param_gather_with_optimizer_step(self, value: bool) -> None:
        self.engine.gather.is_begun_by_optimizer = value

    @property
    def force_all_reduce(self) -> bool:
        """True to reduce by all-reduces even where the optimizer is sharded."""
        return self.engine.state.forces_all_reduce

    @force_all_reduce.setter
    def force_all_reduce(self, value: bool) -> None:
        self.engine.state.forces_all_reduce = value


def _groups_of(
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    pg_collection: Any,
    process_group: Any,
    expert_process_group: Any,
) -> MegatronGroups:
    """Process groups of a wrapper's arguments."""
    if process_group is None and _is_initialized():
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.setup_process_groups_for_ddp(pg_collection, config, ddp_config)
        groups.pop("intra_dist_opt_group", None)
        return MegatronGroups(**groups)
    if pg_collection is None:
        return MegatronGroups.of(ProcessGroups.of(process_group, expert_process_group))
    has_instances = ddp_config.num_distributed_optimizer_instances > 1
    return MegatronGroups.of_collection(pg_collection, has_instances=has_instances)


def _rank_of(group: Any) -> int:
    """This process's rank in a process group, or in the first of several."""
    return int((group[0] if isinstance(group, list) else group).rank())


def _unless_capturing(hook: Callable[..., None]) -> Callable[..., None]:
    """Makes a hook that does nothing while a CUDA graph is captured."""
    if MegatronModule is torch.nn.Module:
        return hook
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    def guarded(*arguments: Any) -> None:
        if not is_graph_capturing():
            hook(*arguments)

    return guarded


def _is_initialized() -> bool:
    """True if Megatron Core's groups of processes exist."""
    if MegatronModule is torch.nn.Module:
        return False
    from megatron.core import parallel_state

    return bool(parallel_state.is_initialized())


def finalize_model_grads(
    model: Sequence[DistributedDataParallel], num_tokens: torch.Tensor | int | None = None
) -> int | None:
    """Collective over the ranks: finishes the gradients of all parts of a model, and divides them by the tokens.

    Covers data parallelism only: Megatron Core's function of this name also reduces what pipeline and tensor parallel
    ranks share, and runs on these wrappers too.

    Args:
        model: wrappers of the parts of the model that this rank has, at least one.
        num_tokens: number of tokens of this rank in the step; gradients are divided by the sum over all ranks. None
            to leave them as they are.

    Returns:
        The sum of `num_tokens` over all ranks; None if that is None.

    Raises:
        GradientError: see `DistributedDataParallel.finish_grad_sync`.
        CollectiveError: another rank failed.
    """
    for part in model:
        part.finish_grad_sync()
    if num_tokens is None:
        return None
    own = np.array([int(num_tokens)], dtype=np.int64)
    total: int = sum(model[0].engine.exchange(own, TOKENS)[:, 0].tolist())
    for part in model:
        part.scale_gradients(1.0 / max(total, 1))
    return total
