"""Table of the names in Megatron Core's modules and their implementations in Trackbed."""

from collections.abc import Mapping
from typing import Final

_OBJECT_STORAGE: Final = {
    **dict.fromkeys(("ObjectStorageConfig", "S3Config"), "trackbed.tokens.stored.config:ObjectStorageConfig"),
    **{
        name: f"trackbed.megatron.functions:{name}"
        for name in (
            "S3Client",
            "cache_index_file",
            "dataset_exists",
            "get_index_cache_path",
            "get_object_storage_access",
            "is_object_storage_path",
            "parse_s3_path",
        )
    },
}

MODULES: Final[Mapping[str, Mapping[str, str]]] = {
    "datasets.bert_dataset": {
        "BERTMaskedWordPieceDataset": "trackbed.datasets.masked.bert:BERTMaskedWordPieceDataset",
        "BERTMaskedWordPieceDatasetConfig": "trackbed.datasets.masked.bert:BERTMaskedWordPieceDatasetConfig",
    },
    "datasets.blended_dataset": {
        "BlendedDataset": "trackbed.datasets.blend.dataset:BlendedDataset",
    },
    "datasets.blended_megatron_dataset_builder": {
        "BlendedMegatronDatasetBuilder": "trackbed.builder.builder:BlendedMegatronDatasetBuilder",
        "DistributedDataset": "trackbed.builder.builder:DistributedDataset",
        "TopLevelDataset": "trackbed.builder.builder:TopLevelDataset",
    },
    "datasets.blended_megatron_dataset_config": {
        "BlendedMegatronDatasetConfig": "trackbed.datasets.config:BlendedMegatronDatasetConfig",
        "convert_split_vector_to_split_matrix": "trackbed.index.splits:convert_split_vector_to_split_matrix",
        "parse_and_normalize_split": "trackbed.index.splits:parse_and_normalize_split",
    },
    "datasets.gpt_dataset": {
        "GPTDataset": "trackbed.datasets.gpt.dataset:GPTDataset",
        "GPTDatasetConfig": "trackbed.datasets.gpt.config:GPTDatasetConfig",
        "MockGPTDataset": "trackbed.datasets.mock:MockGPTDataset",
        "MockGPTLowLevelDataset": "trackbed.datasets.mock:MockGPTLowLevelDataset",
    },
    "datasets.helpers": {
        "build_blending_indices": "trackbed.megatron.functions:build_blending_indices",
        "build_exhaustive_blending_indices": "trackbed.megatron.functions:build_exhaustive_blending_indices",
        "build_mapping": "trackbed.megatron.functions:build_mapping",
        "build_sample_idx": "trackbed.megatron.functions:build_sample_idx",
        "build_sample_idx_int32": "trackbed.megatron.functions:build_sample_idx_int32",
        "build_sample_idx_int64": "trackbed.megatron.functions:build_sample_idx_int64",
    },
    "datasets.indexed_dataset": {
        "DType": "trackbed.tokens.dtype:DType",
        "IndexedDataset": "trackbed.datasets.low_level:IndexedDataset",
        "IndexedDatasetBuilder": "trackbed.tokens.writer:IndexedDatasetBuilder",
        "ObjectStorageConfig": "trackbed.tokens.stored.config:ObjectStorageConfig",
        "S3Config": "trackbed.tokens.stored.config:ObjectStorageConfig",
        "_IndexReader": "trackbed.megatron.functions:open_index",
        "get_bin_path": "trackbed.tokens.paths:get_bin_path",
        "get_idx_path": "trackbed.tokens.paths:get_idx_path",
    },
    "datasets.masked_dataset": {
        "MaskedWordPieceDataset": "trackbed.datasets.masked.dataset:MaskedWordPieceDataset",
        "MaskedWordPieceDatasetConfig": "trackbed.datasets.masked.config:MaskedWordPieceDatasetConfig",
    },
    "datasets.megatron_dataset": {
        "LowLevelDataset": "trackbed.datasets.megatron_dataset:LowLevelDataset",
        "MegatronDataset": "trackbed.datasets.megatron_dataset:MegatronDataset",
    },
    "datasets.megatron_tokenizer": {
        "MegatronLegacyTokenizer": "trackbed.datasets.tokenizers.base:MegatronTokenizer",
        "MegatronTokenizer": "trackbed.datasets.tokenizers.base:MegatronTokenizer",
    },
    "datasets.multimodal_dataset": {
        "MockMultimodalDataset": "trackbed.datasets.mock:MockMultimodalDataset",
        "MultimodalDatasetConfig": "trackbed.datasets.mock:MultimodalDatasetConfig",
    },
    "datasets.object_storage_utils": _OBJECT_STORAGE,
    "datasets.t5_dataset": {
        "T5MaskedWordPieceDataset": "trackbed.datasets.masked.t5:T5MaskedWordPieceDataset",
        "T5MaskedWordPieceDatasetConfig": "trackbed.datasets.masked.t5:T5MaskedWordPieceDatasetConfig",
    },
    "datasets.utils": {
        "Split": "trackbed.index.splits:Split",
        "compile_helpers": "trackbed.megatron.functions:compile_helpers",
        "get_blend_from_list": "trackbed.index.splits:get_blend_from_list",
        "log_single_rank": "trackbed.megatron.functions:log_single_rank",
        "normalize": "trackbed.index.splits:normalize",
    },
    "datasets.utils_s3": {**_OBJECT_STORAGE, "is_s3_path": "trackbed.megatron.functions:is_s3_path"},
    "dist_checkpointing": {
        "LocalNonpersistentObject": "trackbed.checkpoint.state.sharded_object:LocalNonpersistentObject",
        "ShardedObject": "trackbed.checkpoint.state.sharded_object:ShardedObject",
        "ShardedTensor": "trackbed.checkpoint.state.sharded_tensor:ShardedTensor",
        "check_is_distributed_checkpoint": (
            "trackbed.megatron.checkpoints.serialization:check_is_distributed_checkpoint"
        ),
        "load": "trackbed.megatron.checkpoints.serialization:load",
        "load_common_state_dict": "trackbed.megatron.checkpoints.serialization:load_common_state_dict",
        "load_content_metadata": "trackbed.megatron.checkpoints.serialization:load_content_metadata",
        "load_plain_tensors": "trackbed.megatron.checkpoints.serialization:load_plain_tensors",
        "load_tensors_metadata": "trackbed.megatron.checkpoints.serialization:load_tensors_metadata",
        "remove_sharded_tensors": "trackbed.megatron.checkpoints.serialization:remove_sharded_tensors",
        "save": "trackbed.megatron.checkpoints.serialization:save",
    },
    "dist_checkpointing.core": {
        "CONFIG_FNAME": "trackbed.checkpoint.format.config_file:CONFIG_NAME",
        "CheckpointingConfig": "trackbed.checkpoint.format.config_file:CheckpointingConfig",
        "CheckpointingException": "trackbed.errors:CheckpointError",
        "check_is_distributed_checkpoint": (
            "trackbed.megatron.checkpoints.serialization:check_is_distributed_checkpoint"
        ),
        "maybe_load_config": "trackbed.checkpoint.format.config_file:maybe_load_config",
        "save_config": "trackbed.megatron.checkpoints.serialization:save_config",
    },
    "dist_checkpointing.dict_utils": {
        "dict_list_map_inplace": "trackbed.megatron.checkpoints.entries:dict_list_map_inplace",
        "dict_list_map_outplace": "trackbed.checkpoint.state.tree:dict_list_map_outplace",
        "dict_map": "trackbed.megatron.checkpoints.entries:dict_map",
        "dict_map_with_key": "trackbed.megatron.checkpoints.entries:dict_map_with_key",
        "diff": "trackbed.checkpoint.state.tree:diff",
        "extract_matching_values": "trackbed.checkpoint.state.tree:extract_matching_values",
        "inspect_types": "trackbed.megatron.checkpoints.entries:inspect_types",
        "map_reduce": "trackbed.megatron.checkpoints.entries:map_reduce",
        "merge": "trackbed.checkpoint.state.tree:merge",
        "nested_items_iter": "trackbed.checkpoint.state.tree:nested_items_iter",
        "nested_values": "trackbed.checkpoint.state.tree:nested_values",
    },
    "dist_checkpointing.exchange_utils": {
        "ShardDistribution": "trackbed.megatron.checkpoints.shard_exchange:ShardDistribution",
        "_get_empty_tensor_for_exchange": "trackbed.megatron.checkpoints.shard_exchange:get_empty_tensor_for_exchange",
        "_shard_size": "trackbed.megatron.checkpoints.shard_exchange:shard_size",
        "determine_main_replica_uniform_distribution": (
            "trackbed.megatron.checkpoints.shard_exchange:determine_main_replica_uniform_distribution"
        ),
        "distribute_shards_to_ranks": "trackbed.megatron.checkpoints.shard_exchange:distribute_shards_to_ranks",
        "exchange_by_distribution": "trackbed.megatron.checkpoints.shard_exchange:exchange_by_distribution",
        "exchange_loaded_objects_gather_object": (
            "trackbed.megatron.checkpoints.shard_exchange:exchange_loaded_objects_gather_object"
        ),
        "exchange_loaded_tensors_broadcast": (
            "trackbed.megatron.checkpoints.shard_exchange:exchange_loaded_tensors_broadcast"
        ),
        "exchange_loaded_tensors_gather_object": (
            "trackbed.megatron.checkpoints.shard_exchange:exchange_loaded_tensors_gather_object"
        ),
        "exchange_loaded_tensors_gather_rounds": (
            "trackbed.megatron.checkpoints.shard_exchange:exchange_loaded_tensors_gather_rounds"
        ),
        "is_float8tensor": "trackbed.megatron.checkpoints.shard_exchange:is_float8tensor",
    },
    "dist_checkpointing.mapping": {
        "CheckpointingException": "trackbed.errors:CheckpointError",
        "CommonStateDict": "trackbed.checkpoint.state.sharded_tensor:StateDict",
        "FactoryBuildFn": "trackbed.checkpoint.state.sharded_tensor:Builder",
        "FactoryMergeFn": "trackbed.checkpoint.state.sharded_tensor:Merger",
        "LocalNonpersistentObject": "trackbed.checkpoint.state.sharded_object:LocalNonpersistentObject",
        "ReplicaId": "trackbed.checkpoint.state.sharded_tensor:ReplicaId",
        "ShardedBase": "trackbed.checkpoint.state.sharded_tensor:ShardedBase",
        "ShardedObject": "trackbed.checkpoint.state.sharded_object:ShardedObject",
        "ShardedStateDict": "trackbed.checkpoint.state.sharded_tensor:StateDict",
        "ShardedTensor": "trackbed.checkpoint.state.sharded_tensor:ShardedTensor",
        "ShardedTensorFactory": "trackbed.checkpoint.state.sharded_tensor:ShardedTensorFactory",
        "StateDict": "trackbed.checkpoint.state.sharded_tensor:StateDict",
        "apply_factories": "trackbed.megatron.checkpoints.entries:apply_factories",
        "apply_factory_merges": "trackbed.checkpoint.state.sharded_tensor:apply_factory_merges",
        "dict_list_map_inplace": "trackbed.megatron.checkpoints.entries:dict_list_map_inplace",
        "is_main_replica": "trackbed.checkpoint.state.sharded_tensor:is_main_replica",
    },
    "dist_checkpointing.optimizer": {
        "KEEP_VARS_HINT": "trackbed.megatron.checkpoints.optimizer_entries:KEEP_VARS_HINT",
        "get_optim_param_to_id_map": "trackbed.megatron.checkpoints.optimizer_entries:get_optim_param_to_id_map",
        "get_param_id_to_sharded_param_map": (
            "trackbed.megatron.checkpoints.optimizer_entries:get_param_id_to_sharded_param_map"
        ),
        "make_sharded_optimizer_tensor": (
            "trackbed.megatron.checkpoints.optimizer_entries:make_sharded_optimizer_tensor"
        ),
        "optim_state_to_sharding_state": (
            "trackbed.megatron.checkpoints.optimizer_entries:optim_state_to_sharding_state"
        ),
    },
    "dist_checkpointing.serialization": {
        "CkptShardedMetadata": "trackbed.megatron.checkpoints.serialization:Described",
        "get_default_load_sharded_strategy": (
            "trackbed.megatron.checkpoints.serialization:get_default_load_sharded_strategy"
        ),
        "get_default_save_common_strategy": (
            "trackbed.megatron.checkpoints.serialization:get_default_save_common_strategy"
        ),
        "get_default_save_sharded_strategy": (
            "trackbed.megatron.checkpoints.serialization:get_default_save_sharded_strategy"
        ),
        "load": "trackbed.megatron.checkpoints.serialization:load",
        "load_common_state_dict": "trackbed.megatron.checkpoints.serialization:load_common_state_dict",
        "load_content_metadata": "trackbed.megatron.checkpoints.serialization:load_content_metadata",
        "load_plain_tensors": "trackbed.megatron.checkpoints.serialization:load_plain_tensors",
        "load_sharded_metadata": "trackbed.megatron.checkpoints.serialization:load_sharded_metadata",
        "load_tensors_metadata": "trackbed.megatron.checkpoints.serialization:load_tensors_metadata",
        "remove_sharded_tensors": "trackbed.megatron.checkpoints.serialization:remove_sharded_tensors",
        "save": "trackbed.megatron.checkpoints.serialization:save",
    },
    "dist_checkpointing.state_dict_utils": {
        "filter_out_empty_flatten_tensor": (
            "trackbed.megatron.checkpoints.serialization:filter_out_empty_flatten_tensor"
        ),
        "load_preprocess": "trackbed.megatron.checkpoints.serialization:load_preprocess",
        "save_preprocess": "trackbed.megatron.checkpoints.serialization:save_preprocess",
    },
    "dist_checkpointing.strategies.async_utils": {
        "AsyncCallsQueue": "trackbed.megatron.checkpoints.async_requests:AsyncCallsQueue",
        "AsyncRequest": "trackbed.megatron.checkpoints.async_requests:AsyncRequest",
    },
    "dist_checkpointing.strategies.base": {
        "AsyncSaveShardedStrategy": "trackbed.megatron.checkpoints.strategies:AsyncSaveShardedStrategy",
        "LoadCommonStrategy": "trackbed.megatron.checkpoints.strategies:LoadCommonStrategy",
        "LoadShardedStrategy": "trackbed.megatron.checkpoints.strategies:LoadShardedStrategy",
        "LoadStrategyBase": "trackbed.megatron.checkpoints.strategies:LoadStrategyBase",
        "SaveCommonStrategy": "trackbed.megatron.checkpoints.strategies:SaveCommonStrategy",
        "SaveShardedStrategy": "trackbed.megatron.checkpoints.strategies:SaveShardedStrategy",
        "SaveStrategyBase": "trackbed.megatron.checkpoints.strategies:SaveStrategyBase",
        "StrategyAction": "trackbed.megatron.checkpoints.strategies:StrategyAction",
        "async_calls": "trackbed.megatron.checkpoints.strategies:async_calls",
        "default_strategies": "trackbed.megatron.checkpoints.strategies:default_strategies",
        "get_default_strategy": "trackbed.megatron.checkpoints.strategies:get_default_strategy",
        "register_default_strategy": "trackbed.megatron.checkpoints.strategies:register_default_strategy",
    },
    "dist_checkpointing.strategies.common": {
        "COMMON_STATE_FNAME": "trackbed.checkpoint.folder:COMMON_NAME",
        "TorchCommonLoadStrategy": "trackbed.megatron.checkpoints.strategies:TorchCommonLoadStrategy",
        "TorchCommonSaveStrategy": "trackbed.megatron.checkpoints.strategies:TorchCommonSaveStrategy",
        "register_default_common_strategies": "trackbed.megatron.checkpoints.strategies:register_default_strategies",
    },
    "dist_checkpointing.strategies.fully_parallel": {
        "FullyParallelLoadStrategyWrapper": (
            "trackbed.megatron.checkpoints.fully_parallel:FullyParallelLoadStrategyWrapper"
        ),
        "FullyParallelSaveStrategyWrapper": (
            "trackbed.megatron.checkpoints.fully_parallel:FullyParallelSaveStrategyWrapper"
        ),
        "T": "trackbed.megatron.checkpoints.fully_parallel:T",
        "_defer_loading_sharded_items": "trackbed.megatron.checkpoints.fully_parallel:defer_loading_sharded_items",
        "_fill_in_deferred_sharded_items": (
            "trackbed.megatron.checkpoints.fully_parallel:fill_in_deferred_sharded_items"
        ),
        "_sharded_tensor_shard_id": "trackbed.megatron.checkpoints.entries:shard_id",
        "distribute_main_replicas_with_precomputed_distribution": (
            "trackbed.megatron.checkpoints.fully_parallel:distribute_main_replicas_with_precomputed_distribution"
        ),
        "logger": "trackbed.megatron.checkpoints.fully_parallel:logger",
    },
    "dist_checkpointing.strategies.torch": {
        "TorchDistLoadShardedStrategy": "trackbed.megatron.checkpoints.strategies:TorchDistLoadShardedStrategy",
        "TorchDistSaveShardedStrategy": "trackbed.megatron.checkpoints.strategies:TorchDistSaveShardedStrategy",
        "register_default_torch_strategies": "trackbed.megatron.checkpoints.strategies:register_default_strategies",
    },
    "dist_checkpointing.utils": {
        "_ShardId": "trackbed.megatron.checkpoints.entries:ShardId",
        "_clean_metadata_for_serialization": "trackbed.megatron.checkpoints.entries:clean_metadata",
        "_sharded_object_id": "trackbed.megatron.checkpoints.entries:object_id",
        "_sharded_tensor_shard_id": "trackbed.megatron.checkpoints.entries:shard_id",
        "add_prefix_for_sharding": "trackbed.megatron.checkpoints.entries:add_prefix_for_sharding",
        "apply_prefix_mapping": "trackbed.megatron.checkpoints.entries:apply_prefix_mapping",
        "debug_msg": "trackbed.megatron.checkpoints.entries:debug_msg",
        "debug_time": "trackbed.megatron.checkpoints.entries:debug_time",
        "extract_nonpersistent": "trackbed.megatron.checkpoints.entries:extract_nonpersistent",
        "extract_sharded_base": "trackbed.megatron.checkpoints.entries:extract_sharded_base",
        "extract_sharded_tensors": "trackbed.megatron.checkpoints.entries:extract_sharded_tensors",
        "extract_sharded_tensors_and_factories": (
            "trackbed.megatron.checkpoints.entries:extract_sharded_tensors_and_factories"
        ),
        "extract_sharded_tensors_or_nonpersistent": (
            "trackbed.megatron.checkpoints.entries:extract_sharded_tensors_or_nonpersistent"
        ),
        "force_all_tensors_to_non_fp8": "trackbed.megatron.checkpoints.entries:force_all_tensors_to_non_fp8",
        "logger_stack": "trackbed.megatron.checkpoints.entries:logger_stack",
        "replace_prefix_for_sharding": "trackbed.megatron.checkpoints.entries:replace_prefix_for_sharding",
        "zip_strict": "trackbed.megatron.checkpoints.entries:zip_strict",
    },
    "dist_checkpointing.validation": {
        "StrictHandling": "trackbed.megatron.checkpoints.strictness:StrictHandling",
        "_determine_missing_and_unexpected_keys": (
            "trackbed.megatron.checkpoints.strictness:determine_missing_and_unexpected_keys"
        ),
        "adjust_non_strict_load": "trackbed.megatron.checkpoints.strictness:adjust_non_strict_load",
        "determine_global_metadata": "trackbed.megatron.checkpoints.strictness:determine_global_metadata",
        "maybe_report_missing_and_unexpected_keys": (
            "trackbed.megatron.checkpoints.strictness:maybe_report_missing_and_unexpected_keys"
        ),
        "parse_strict_flag": "trackbed.megatron.checkpoints.strictness:parse_strict_flag",
        "validate_integrity_and_strict_load": (
            "trackbed.megatron.checkpoints.strictness:validate_integrity_and_strict_load"
        ),
        "validate_sharded_objects_handling": (
            "trackbed.megatron.checkpoints.strictness:validate_sharded_objects_handling"
        ),
        "validate_sharding_integrity": "trackbed.megatron.checkpoints.strictness:validate_sharding_integrity",
        "verify_checkpoint_and_load_strategy": (
            "trackbed.megatron.checkpoints.strictness:verify_checkpoint_and_load_strategy"
        ),
    },
    "distributed": {
        "DistributedDataParallel": "trackbed.megatron.ddp:DistributedDataParallel",
        "DistributedDataParallelConfig": "trackbed.megatron.ddp_config:DistributedDataParallelConfig",
        "finalize_model_grads": "trackbed.megatron.ddp:finalize_model_grads",
    },
    "distributed.distributed_data_parallel": {
        "DistributedDataParallel": "trackbed.megatron.ddp:DistributedDataParallel",
    },
    "distributed.distributed_data_parallel_config": {
        "DistributedDataParallelConfig": "trackbed.megatron.ddp_config:DistributedDataParallelConfig",
    },
    "distributed.param_and_grad_buffer": {
        "BufferType": "trackbed.grads.buffer:BufferType",
        "_ParamAndGradBucket": "trackbed.grads.buffer:_ParamAndGradBucket",
        "_ParamAndGradBucketGroup": "trackbed.grads.bucket_group:_ParamAndGradBucketGroup",
        "_ParamAndGradBuffer": "trackbed.grads.buffer:_ParamAndGradBuffer",
        "dist_all_gather_func": "trackbed.grads.collectives.torch:dist_all_gather_func",
        "dist_reduce_scatter_func": "trackbed.grads.collectives.torch:dist_reduce_scatter_func",
        "logger": "trackbed.megatron.rerun:logger",
        "partition_buckets": "trackbed.grads.parameter_set:partition_buckets",
        "reduce_scatter_with_fp32_accumulation": (
            "trackbed.grads.collectives.fp32_accumulation:reduce_scatter_with_fp32_accumulation"
        ),
        "shard_buffer": "trackbed.grads.buffer:shard_buffer",
    },
    "distributed.reduce_scatter_with_fp32_accumulation": {
        "reduce_scatter_with_fp32_accumulation": (
            "trackbed.grads.collectives.fp32_accumulation:reduce_scatter_with_fp32_accumulation"
        ),
    },
}
"""For each module path below `megatron.core`: `module:name` of the implementation, by name.

The names of a package, as those of `distributed` and `dist_checkpointing`, are used only if Megatron Core is not
installed: its own package imports them from the modules below it.
"""


def part_of(path: str) -> str:
    """Part that a module path belongs to: its first package."""
    return path.partition(".")[0]


PARTS: Final = tuple(dict.fromkeys(map(part_of, MODULES)))
"""Parts that `trackbed.megatron.install` can install one by one."""
