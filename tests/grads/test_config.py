"""Options of data parallelism."""

from dataclasses import fields

import pytest

from trackbed.errors import ArgumentError
from trackbed.grads import DistributedDataParallelConfig
from trackbed.grads.config import with_bucket_size
from trackbed.megatron import DistributedDataParallelConfig as MegatronConfig


def test_the_options_are_few_and_each_has_megatrons_name_and_default():
    found = {option.name: option.default for option in fields(DistributedDataParallelConfig)}
    theirs = {option.name: option.default for option in fields(MegatronConfig)}
    assert len(found) <= 14
    assert found.items() <= theirs.items()


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="positional argument"):
        DistributedDataParallelConfig(True)


def test_what_megatrons_configuration_may_change_is_fixed():
    config = DistributedDataParallelConfig()
    assert (config.align_param_gather, config.num_distributed_optimizer_instances) == (False, 1)


def test_unknown_collectives_are_refused():
    with pytest.raises(ArgumentError, match="collectives must be one of auto, torch, shared_memory, but is 'nccl'"):
        DistributedDataParallelConfig(collectives="nccl")


@pytest.mark.parametrize("kind", [DistributedDataParallelConfig, MegatronConfig])
def test_large_groups_have_large_buckets(kind):
    config = kind(overlap_grad_reduce=True)
    assert [with_bucket_size(config, ranks).bucket_size for ranks in (1, 40, 41)] == [40_000_000] * 2 + [41_000_000]
    assert with_bucket_size(kind(overlap_grad_reduce=True, bucket_size=7), 100).bucket_size == 7
    assert with_bucket_size(kind(bucket_size=7), 100).bucket_size is None
    assert config.bucket_size is None
