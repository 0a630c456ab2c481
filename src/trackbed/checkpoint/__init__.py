"""Sharded checkpoints: written by all ranks, committed whole or not at all, loaded in any layout.

`save`, `load`, `latest_checkpoint`, `open_checkpoint` and `find_damage` are Trackbed's own; other functions, strategies
and wrappers have the names of Megatron Core 0.16.1, where they lie in several modules.
"""

from trackbed.checkpoint.config_file import (
    CheckpointingConfig,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)
from trackbed.checkpoint.latest import latest_checkpoint
from trackbed.checkpoint.load import load
from trackbed.checkpoint.mapping import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)
from trackbed.checkpoint.reading import Checkpoint, TensorReader, open_checkpoint
from trackbed.checkpoint.save import save
from trackbed.checkpoint.verify import find_damage
from trackbed.megatron.checkpoints.async_requests import AsyncCallsQueue, AsyncRequest
from trackbed.megatron.checkpoints.distribution import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
)
from trackbed.megatron.checkpoints.exchange import (
    exchange_by_distribution,
    exchange_loaded_objects_gather_object,
    exchange_loaded_tensors_broadcast,
    exchange_loaded_tensors_gather_object,
    exchange_loaded_tensors_gather_rounds,
)
from trackbed.megatron.checkpoints.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    distribute_main_replicas_with_precomputed_distribution,
)
from trackbed.megatron.checkpoints.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
)
from trackbed.megatron.checkpoints.strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from trackbed.megatron.checkpoints.strictness import (
    StrictHandling,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
)

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "Checkpoint",
    "CheckpointingConfig",
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardDistribution",
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "TensorReader",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "apply_factories",
    "apply_factory_merges",
    "check_is_distributed_checkpoint",
    "determine_global_metadata",
    "determine_main_replica_uniform_distribution",
    "distribute_main_replicas_with_precomputed_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
    "exchange_loaded_tensors_broadcast",
    "exchange_loaded_tensors_gather_object",
    "exchange_loaded_tensors_gather_rounds",
    "find_damage",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "is_main_replica",
    "latest_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "maybe_load_config",
    "open_checkpoint",
    "parse_strict_flag",
    "remove_sharded_tensors",
    "save",
    "save_config",
    "validate_integrity_and_strict_load",
    "validate_sharding_integrity",
]
