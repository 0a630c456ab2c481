"""Optimizer of data-parallel models, sharded where their gradients are."""

from trackbed.optim.norm import global_norm
from trackbed.optim.optimizer import DataParallelOptimizer, StepReport

__all__ = ["DataParallelOptimizer", "StepReport", "global_norm"]
