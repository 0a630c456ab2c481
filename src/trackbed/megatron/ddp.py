"""`DistributedDataParallel` as Megatron Core's programs expect it: a module of Megatron Core, on its process groups."""

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trackbed.grads.config import DistributedDataParallelConfig
from trackbed.grads.ddp import DistributedDataParallel as DataParallel
from trackbed.grads.process_groups import ProcessGroups
from trackbed.megatron import rerun as _rerun  # which begins to ask the rerun state machine

del _rerun

if TYPE_CHECKING:
    MegatronModule = torch.nn.Module
else:
    MegatronModule = torch.nn.Module
    if "megatron.core" in sys.modules:  # which imports this module, after `install`
        with contextlib.suppress(ModuleNotFoundError):  # Megatron Core is not installed
            from megatron.core.transformer.module import MegatronModule

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(DataParallel, MegatronModule):
    """Wraps a model of Megatron Core; see `trackbed.grads.DistributedDataParallel`.

    Process groups come from `pg_collection` or, without it, from Megatron Core's `parallel_state`; only where that has
    not been initialised, all ranks are data-parallel.
    """

    def _init_module(self, config: Any) -> None:
        if MegatronModule is torch.nn.Module:
            super()._init_module(config)
        else:
            MegatronModule.__init__(self, config=config)

    def _process_groups(
        self,
        pg_collection: Any,
        ddp_config: DistributedDataParallelConfig,
        process_group: Any,
        expert_process_group: Any,
    ) -> ProcessGroups:
        if process_group is not None or not _is_initialized():
            return super()._process_groups(pg_collection, ddp_config, process_group, expert_process_group)
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection.setup_process_groups_for_ddp(pg_collection, self.config, ddp_config)
        groups.pop("intra_dist_opt_group", None)
        return ProcessGroups(**groups)

    def _decorate_hook(self, hook: Callable[..., None]) -> Callable[..., None]:
        return _unless_capturing(hook)


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
