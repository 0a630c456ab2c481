"""Sharded checkpoints: written by all ranks, committed whole or not at all, loaded in any layout."""

from trackbed.checkpoint.load import load
from trackbed.checkpoint.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from trackbed.checkpoint.reading import Checkpoint, TensorReader, open_checkpoint
from trackbed.checkpoint.save import save
from trackbed.checkpoint.verify import find_damage

__all__ = [
    "Checkpoint",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TensorReader",
    "find_damage",
    "load",
    "open_checkpoint",
    "save",
]
