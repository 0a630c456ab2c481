"""Optimizer of data-parallel models, sharded where their gradients are."""

from trackbed.optim.optimizer import DataParallelOptimizer, StepReport

__all__ = ["DataParallelOptimizer", "StepReport"]
