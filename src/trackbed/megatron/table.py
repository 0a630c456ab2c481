"""Table of the names in Megatron Core's modules and their implementations in Trackbed."""

from collections.abc import Mapping
from typing import Final

__all__ = ["MODULES", "PARTS", "part_of"]

MODULES: Final[Mapping[str, Mapping[str, str]]] = {
    "datasets.blended_dataset": {
        "BlendedDataset": "trackbed.datasets.blended:BlendedDataset",
    },
    "datasets.blended_megatron_dataset_builder": {
        "BlendedMegatronDatasetBuilder": "trackbed.builder.builder:BlendedMegatronDatasetBuilder",
    },
    "datasets.blended_megatron_dataset_config": {
        "BlendedMegatronDatasetConfig": "trackbed.datasets.config:BlendedMegatronDatasetConfig",
        "convert_split_vector_to_split_matrix": "trackbed.index.splits:convert_split_vector_to_split_matrix",
        "parse_and_normalize_split": "trackbed.index.splits:parse_and_normalize_split",
    },
    "datasets.gpt_dataset": {
        "GPTDataset": "trackbed.datasets.gpt:GPTDataset",
        "GPTDatasetConfig": "trackbed.datasets.gpt_config:GPTDatasetConfig",
        "MockGPTDataset": "trackbed.datasets.mock:MockGPTDataset",
        "MockGPTLowLevelDataset": "trackbed.datasets.mock:MockGPTLowLevelDataset",
    },
    "datasets.helpers": {
        "build_blending_indices": "trackbed.megatron.functions:build_blending_indices",
        "build_exhaustive_blending_indices": "trackbed.megatron.functions:build_exhaustive_blending_indices",
        "build_sample_idx": "trackbed.megatron.functions:build_sample_idx",
        "build_sample_idx_int32": "trackbed.megatron.functions:build_sample_idx_int32",
        "build_sample_idx_int64": "trackbed.megatron.functions:build_sample_idx_int64",
    },
    "datasets.indexed_dataset": {
        "DType": "trackbed.tokens.dtype:DType",
        "IndexedDataset": "trackbed.tokens.reader:IndexedDataset",
        "IndexedDatasetBuilder": "trackbed.tokens.writer:IndexedDatasetBuilder",
        "_IndexReader": "trackbed.megatron.functions:open_index",
        "get_bin_path": "trackbed.tokens.paths:get_bin_path",
        "get_idx_path": "trackbed.tokens.paths:get_idx_path",
    },
    "datasets.megatron_dataset": {
        "LowLevelDataset": "trackbed.datasets.megatron:LowLevelDataset",
        "MegatronDataset": "trackbed.datasets.megatron:MegatronDataset",
    },
    "datasets.megatron_tokenizer": {
        "MegatronLegacyTokenizer": "trackbed.datasets.tokenizer:MegatronTokenizer",
        "MegatronTokenizer": "trackbed.datasets.tokenizer:MegatronTokenizer",
    },
    "datasets.utils": {
        "Split": "trackbed.index.splits:Split",
        "compile_helpers": "trackbed.megatron.functions:compile_helpers",
        "get_blend_from_list": "trackbed.index.splits:get_blend_from_list",
        "log_single_rank": "trackbed.megatron.functions:log_single_rank",
        "normalize": "trackbed.index.splits:normalize",
    },
    "distributed": {
        "DistributedDataParallel": "trackbed.megatron.ddp:DistributedDataParallel",
        "DistributedDataParallelConfig": "trackbed.grads.config:DistributedDataParallelConfig",
        "finalize_model_grads": "trackbed.grads.finalize:finalize_model_grads",
    },
    "distributed.distributed_data_parallel": {
        "DistributedDataParallel": "trackbed.megatron.ddp:DistributedDataParallel",
    },
    "distributed.distributed_data_parallel_config": {
        "DistributedDataParallelConfig": "trackbed.grads.config:DistributedDataParallelConfig",
    },
    "distributed.param_and_grad_buffer": {
        "BufferType": "trackbed.grads.buffer:BufferType",
        "_ParamAndGradBucket": "trackbed.grads.buffer:_ParamAndGradBucket",
        "_ParamAndGradBucketGroup": "trackbed.grads.bucket_group:_ParamAndGradBucketGroup",
        "_ParamAndGradBuffer": "trackbed.grads.buffer:_ParamAndGradBuffer",
        "dist_all_gather_func": "trackbed.grads.collectives.torch:dist_all_gather_func",
        "dist_reduce_scatter_func": "trackbed.grads.collectives.torch:dist_reduce_scatter_func",
        "partition_buckets": "trackbed.grads.partition:partition_buckets",
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

The names of a package, as those of `distributed`, are used only if Megatron Core is not installed: its own package
imports them from the modules below it.
"""


def part_of(path: str) -> str:
    """Part that a module path belongs to: its first package."""
    return path.partition(".")[0]


PARTS: Final = tuple(dict.fromkeys(map(part_of, MODULES)))
"""Parts that `trackbed.megatron.install` can install one by one."""
