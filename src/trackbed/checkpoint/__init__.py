"""Sharded checkpoints: written by all ranks, committed whole or not at all, loaded in any layout."""

from trackbed.checkpoint.damage import find_damage
from trackbed.checkpoint.io.box_parts import boxes
from trackbed.checkpoint.load import DifferingKeys, differing_keys, load
from trackbed.checkpoint.open import Checkpoint, TensorReader, latest_checkpoint, open_checkpoint
from trackbed.checkpoint.random_states import random_states, restore_random_states
from trackbed.checkpoint.save import save
from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject, ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, ShardedTensorFactory

__all__ = [
    "Checkpoint",
    "DifferingKeys",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TensorReader",
    "boxes",
    "differing_keys",
    "find_damage",
    "latest_checkpoint",
    "load",
    "open_checkpoint",
    "random_states",
    "restore_random_states",
    "save",
]
