"""Optimizer of data-parallel models, sharded where their gradients are."""

from trackbed.optim.norm import global_norm
from trackbed.optim.optimizer import DataParallelOptimizer, StepReport
from trackbed.optim.sharded_state import load_sharded_state, sharded_state

__all__ = ["DataParallelOptimizer", "StepReport", "global_norm", "load_sharded_state", "sharded_state"]
