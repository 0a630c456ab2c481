"""Optimizer of data-parallel models, sharded where their gradients are."""

from trackbed.optim.optimizer import DataParallelOptimizer, StepReport
from trackbed.optim.norm import global_norm

__all__ = ["DataParallelOptimizer", "StepReport", "global_norm"]
