"""From datasets to batches: samplers, and the position in the data as state."""

from trackbed.loading.position import Position
from trackbed.loading.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler

__all__ = ["MegatronPretrainingRandomSampler", "MegatronPretrainingSampler", "Position"]
