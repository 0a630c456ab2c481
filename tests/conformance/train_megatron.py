"""Trains a small GPT with Megatron Core's distributed optimizer, and writes checksums of each step.

    export PYTHONPATH=tests/conformance/megatron_lm
    torchrun --nproc-per-node 2 tests/conformance/train_megatron.py FOLDER
    torchrun --nproc-per-node 2 tests/conformance/train_megatron.py FOLDER --install

Each rank writes `FOLDER/<rank>.json`: for each case of `CASES`, a list of steps, and under "buffers" the package whose
buffers it used. Trackbed's replace Megatron Core's under `--install`, and must write the same steps. Ranks communicate
by gloo; CUDA is replaced by `cuda_shim`.

Shapes: B rows of a batch, T tokens of a row, V tokens of the vocabulary, H features.
"""

import argparse
import hashlib
import json
import os
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

STEPS, MICROBATCHES, CLIP = 10, 2, 0.5
B, T, V, H = 2, 16, 93, 24

BF16 = {"dtype": torch.bfloat16}
FP32_GRADS = {"grad_reduce_in_fp32": True}
OVERLAP = {"overlap_grad_reduce": True}
OVERLAP_BOTH = {**OVERLAP, "overlap_param_gather": True}
CASES = {
    "fp32": {},
    "fp32, overlap": OVERLAP,
    "fp32, overlap of gradients and parameters": OVERLAP_BOTH,
    "fp32, average in collective": {**OVERLAP, "average_in_collective": True},
    "fp32, one bucket": {**OVERLAP, "bucket_size": 1_000_000},
    "bf16": BF16,
    "bf16, overlap": {**BF16, **OVERLAP},
    "bf16, fp32 gradients": {**BF16, **FP32_GRADS},
    "bf16, fp32 gradients, overlap of gradients and parameters": {**BF16, **FP32_GRADS, **OVERLAP_BOTH},
    # The last case: Megatron Core keeps this collective for all buffers that are created later.
    "bf16, fp32 accumulation": {**BF16, **OVERLAP, "reduce_scatter_with_fp32_accumulation": True},
}


class Block(nn.Module):
    """Causal attention with one head, and a feed-forward network."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(H), nn.LayerNorm(H)])
        self.attention = nn.Linear(H, 3 * H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        queries, keys, values = self.attention(self.norms[0](x)).chunk(3, dim=-1)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = (queries @ keys.transpose(1, 2) / H**0.5).masked_fill(future, float("-inf"))
        x = x + scores.softmax(-1) @ values
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class SmallGPT(nn.Module):
    """Two blocks; the output weight is that of the embedding, and the positions are frozen."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.positions = nn.Parameter(torch.randn(T, H), requires_grad=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(H)
        self.output = nn.Linear(H, V, bias=False)
        self.output.weight = self.embedding.weight
        self.embedding.weight.shared_embedding = True

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(dtype=torch.float32, bucket_size=2500, **options):
    """Trains the model, and returns one record per step, and one of the final parameters.

    Only this rank's part of each bucket is hashed as main gradients: the rest is undefined after a reduce-scatter.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=bucket_size, **options)
    model = DistributedDataParallel(
        TransformerConfig(num_attention_heads=1, num_layers=1), ddp_config=config, module=SmallGPT().to(dtype)
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            clip_grad=CLIP,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=config.overlap_param_gather,
        ),
        [model],
    )
    batches = torch.Generator().manual_seed(2 + rank)
    steps = []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):
            with model.no_sync() if microbatch < MICROBATCHES - 1 else nullcontext():
                model(torch.randint(V, (B, T + 1), generator=batches)).backward()
        model.finish_grad_sync()
        own = [shard_buffer(bucket.grad_data, size)[rank] for buffer in model.buffers for bucket in buffer.buckets]
        step = {"buckets": len(own), "parameters": checksum(model.parameters()), "main_gradients": checksum(own)}
        _, norm, _ = optimizer.step()
        steps.append({**step, "norm": float(norm).hex()})
    if config.overlap_param_gather:
        model.disable_forward_pre_hook()
    return [*steps, {"parameters": checksum(model.parameters())}]


def checksum(tensors):
    """SHA-256 over the bytes of tensors, in their order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main():
    parser = argparse.ArgumentParser(description="Trains on several ranks and writes checksums of each step.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--install", action="store_true", help="run on Trackbed's buffers")
    options = parser.parse_args()
    if options.install:
        import trackbed.megatron

        trackbed.megatron.install()
    import cuda_shim  # noqa: F401  importing it replaces CUDA
    from megatron.core import parallel_state
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    found = {"buffers": _ParamAndGradBuffer.__module__.partition(".")[0]}
    found |= {name: train(**case) for name, case in CASES.items()}
    (options.folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found, indent=1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
