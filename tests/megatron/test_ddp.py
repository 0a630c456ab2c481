"""What Megatron Core's programs find different from Trackbed's own wrapper."""

from types import SimpleNamespace

import pytest
import torch

import trackbed
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError
from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig


def test_a_loss_per_token_leaves_sums():
    def work(group):
        config = SimpleNamespace(calculate_per_token_loss=True)
        for options, factor in ((None, 0.5), (config, 1.0)):
            model = torch.nn.Linear(2, 2)
            wrapper = DistributedDataParallel(options, DistributedDataParallelConfig(), model, process_group=group)
            assert [buffer.gradient_scaling_factor for buffer in wrapper.buffers] == [factor]
        averaged = DistributedDataParallelConfig(average_in_collective=True)
        with pytest.raises(CollectiveError, match="average_in_collective must be False with calculate_per_token_loss"):
            DistributedDataParallel(config, averaged, torch.nn.Linear(2, 2), process_group=group)

    run_ranks(2, work)


def test_later_pipeline_stages_have_one_bucket():
    stage = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    for pipeline, count in ((alone, 2), (stage, 1)):
        groups = SimpleNamespace(dp=alone, expt_dp=alone, pp=pipeline)
        wrapper = DistributedDataParallel(None, config, torch.nn.Linear(2, 2), pg_collection=groups)
        assert len(wrapper.bucket_groups) == count
        assert wrapper.bucket_size == (1 if count == 2 else None)


def test_buffers_are_megatrons_attribute_and_torchs_method_elsewhere():
    wrapper = DistributedDataParallel(None, DistributedDataParallelConfig(), torch.nn.BatchNorm1d(2))
    assert [buffer.numel_unpadded for buffer in wrapper.buffers] == [4]
    module = torch.nn.BatchNorm1d(2)
    assert len(list(trackbed.DistributedDataParallel(module).buffers())) == len(list(module.buffers())) == 3
