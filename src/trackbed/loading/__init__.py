"""Samplers, prefetching of batches, and the position in the data as checkpoint state."""

from trackbed.loading.balanced_sampler import BalancedSampler
from trackbed.loading.batch_stream import BatchStream, LoaderCounters
from trackbed.loading.mesh import broadcast_batch, keys_for_stage, slice_for_context
from trackbed.loading.position import Position
from trackbed.loading.provenance import Origin, Provenance, provenance
from trackbed.loading.samplers import MegatronPretrainingRandomSampler, MegatronPretrainingSampler

__all__ = [
    "BalancedSampler",
    "BatchStream",
    "LoaderCounters",
    "MegatronPretrainingRandomSampler",
    "MegatronPretrainingSampler",
    "Origin",
    "Position",
    "Provenance",
    "broadcast_batch",
    "keys_for_stage",
    "provenance",
    "slice_for_context",
]
