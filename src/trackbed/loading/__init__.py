"""Samplers, prefetching of batches, and the position in the data as checkpoint state."""

from trackbed.loading.batches import BatchLoader
from trackbed.loading.counters import LoaderCounters
from trackbed.loading.position import Position
from trackbed.loading.provenance import Origin, Provenance, provenance
from trackbed.loading.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler

__all__ = [
    "BatchLoader",
    "LoaderCounters",
    "MegatronPretrainingRandomSampler",
    "MegatronPretrainingSampler",
    "Origin",
    "Position",
    "Provenance",
    "provenance",
]
