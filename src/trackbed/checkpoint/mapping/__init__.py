"""Local pieces of global tensors and objects, in the place of values in a state dictionary."""

from trackbed.checkpoint.mapping.base import ReplicaId, ShardedBase, check_key, is_main_replica
from trackbed.checkpoint.mapping.factory import ShardedTensorFactory, apply_factories, apply_factory_merges
from trackbed.checkpoint.mapping.local import LocalNonpersistentObject
from trackbed.checkpoint.mapping.object import ShardedObject
from trackbed.checkpoint.mapping.tensor import ShardedTensor

__all__ = [
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "apply_factories",
    "apply_factory_merges",
    "check_key",
    "is_main_replica",
]
