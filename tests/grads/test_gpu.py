"""The same code on a GPU, where there is one."""

import datetime as dt

import pytest
import torch
import torch.distributed as dist

from data_parallel import Case, new_model, run_steps, train, wrap
from trackbed.grads.collectives import Label, TorchCollectives
from trackbed.grads.collectives.protocol import shard_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture
def nccl(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=dt.timedelta(seconds=60))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {**SHARDED, "bucket_size": 700}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_on_a_gpu_gives_about_the_losses_of_the_cpu(dtype, options):
    case = Case(dtype, num_micro=2, steps=5, options=options)
    on_cpu = train(None, case)
    wrapper, optimizer = wrap(None, case, model=new_model(dtype).cuda())
    losses, _ = run_steps(wrapper, optimizer, case)
    assert losses == pytest.approx(on_cpu.losses, rel=1e-3 if dtype == torch.float32 else 3e-2)


def test_collectives_of_nccl_on_one_rank(nccl):
    collectives = TorchCollectives(nccl)
    buffer = torch.arange(8.0, device="cuda")
    options = {"scale": 0.5, "average": False, "label": Label()}
    collectives.all_reduce([buffer], **options).wait()
    collectives.reduce_scatter([buffer], **options).wait()
    collectives.all_gather([buffer], label=Label()).wait()
    collectives.broadcast([buffer], source=0).wait()
    assert torch.equal(buffer.cpu(), torch.arange(8.0) / 4)
    assert shard_of(buffer, 0, 1).numel() == 8


def test_buffers_leave_the_gpu_and_come_back():
    wrapper, _ = wrap(None, Case(options=SHARDED), model=new_model().cuda())
    before = [parameter.detach().cpu().clone() for parameter in wrapper.module.parameters()]
    for buffer in wrapper.buffers + wrapper.expert_parallel_buffers:
        buffer.offload_to_cpu()
        assert buffer.grad_data.untyped_storage().nbytes() == 0
        buffer.reload_from_cpu()
        assert not buffer.grad_data.any()
    after = [parameter.detach().cpu() for parameter in wrapper.module.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
