"""One rank that measures its memory: `memory_rank.py CASES`. Writes one line of JSON for each case."""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trackbed.grads import Timeline
from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

WIDTH, LAYERS = 1000, 24


def kilobytes(file, field):
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(field)


def pss():
    """Bytes in use, with a share of shared memory; without pages of libraries, which depend on other processes."""
    gc.collect()
    return 1024 * sum(kilobytes("smaps_rollup", field) for field in ("Pss_Anon:", "Pss_Shmem:"))


def measure(dtype, options):
    dist.barrier()
    base = pss()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(getattr(torch, dtype))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    gc.collect()
    before = kilobytes("status", "VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    timeline = Timeline()
    config = DistributedDataParallelConfig(bucket_size=4_000_000, **options)
    wrapper = DistributedDataParallel(None, config, model, observer=timeline)
    optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), wrapper, max_norm=1.0)
    peak, after = kilobytes("status", "VmHWM:"), kilobytes("status", "VmRSS:")
    for _ in range(2):
        optimizer.zero_grad()
        wrapper(torch.ones(2, WIDTH, dtype=getattr(torch, dtype))).sum().backward()
        optimizer.step()
        wrapper.state_dict()
    dist.barrier()
    used = pss() - base
    dist.barrier()
    return {
        "bytes per parameter": used / num_parameters,
        "excess while wrapping": 1024 * (peak - max(before, after)),
        "largest parameter": max(parameter.nbytes for parameter in model.parameters()),
        "moved": [[event.kind, event.bytes] for event in timeline.events if event.step == 1],
        "buckets": [bucket.grad_data.nbytes for bucket in wrapper.buffers[0].buckets],
        "param buckets": [
            bucket.param_data.nbytes for bucket in wrapper.buffers[0].buckets if bucket.param_data is not None
        ],
    }


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measure("float32", {})  # what libraries keep is there afterwards
    for dtype, options in json.loads(sys.argv[1]):
        print(json.dumps(measure(dtype, options)), flush=True)
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
