"""Trains a small GPT on a blend, stops where it is told to, and continues on any number of ranks.

    torchrun --nproc-per-node 2 examples/train.py job.json --stop-after 40 --save state.pt --losses first.json
    python examples/train.py job.json --resume state.pt --losses second.json

`job.json` has the fields of `Job`. Micro-batch j of a step belongs to rank j mod n of n ranks, so two ranks with one
micro-batch have the losses of one rank with two, to the last bit.
"""

import argparse
import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model import GPT, ModelConfig
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, HuggingFaceTokenizer
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.loading import MegatronPretrainingSampler
from trackbed.optim import DataParallelOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained on what."""

    prefixes: list[str]
    weights: list[float]
    tokenizer: str
    path_to_cache: str
    steps: int
    batch_size: int
    micro_batch_size: int
    sequence_length: int
    seed: int = 1234
    valid_samples: int = 64
    learning_rate: float = 6e-4


def build_datasets(job: Job) -> tuple[list[Any], int]:
    """Training, validation and test data, and the size of the vocabulary."""
    tokenizer = HuggingFaceTokenizer(job.tokenizer)
    config = GPTDatasetConfig(
        random_seed=job.seed,
        sequence_length=job.sequence_length,
        blend=(job.prefixes, job.weights),
        split="90,8,2",
        path_to_cache=job.path_to_cache,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [job.steps * job.batch_size, job.valid_samples, job.valid_samples]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build(), tokenizer.vocab_size


def train(job: Job, *, stop_after: int | None, save: Path | None, resume: Path | None) -> dict[str, Any]:
    """Train to the end, or for `stop_after` steps. Returns losses and figures."""
    started = time.perf_counter()
    (train_data, valid_data, _), vocab_size = build_datasets(job)
    data_seconds = time.perf_counter() - started

    # Another number of threads would change the last bits of a product.
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    torch.use_deterministic_algorithms(mode=True)
    gpt = GPT(ModelConfig(vocab_size=vocab_size, sequence_length=job.sequence_length))
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=500_000
    )
    model = DistributedDataParallel(gpt, config)
    rank, num_ranks = model.dp_group.rank(), model.dp_group.size()
    num_micro = job.batch_size // job.micro_batch_size // num_ranks
    adamw = torch.optim.AdamW(gpt.parameters(), lr=job.learning_rate, weight_decay=0.01)
    optimizer = DataParallelOptimizer(adamw, model, max_norm=1.0)
    sampler = MegatronPretrainingSampler(
        len(train_data), 0, job.micro_batch_size, rank, num_ranks, fingerprint=train_data.fingerprint
    )
    if resume is not None:
        state = torch.load(resume, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_full_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])

    first = sampler.consumed_samples // job.batch_size
    last = job.steps if stop_after is None else first + stop_after
    batches = iter(torch.utils.data.DataLoader(train_data, batch_sampler=sampler))
    losses, drawn = {}, {}
    started = time.perf_counter()
    with model.guarded():
        for step in range(first, last):
            for group in optimizer.param_groups:
                group["lr"] = job.learning_rate * min(1.0, (step + 1) / 20)
            optimizer.zero_grad()
            own, counts = np.zeros(num_micro), np.zeros(len(job.prefixes), dtype=np.int64)
            for micro in range(num_micro):
                batch = next(batches)
                with contextlib.nullcontext() if micro == num_micro - 1 else model.no_sync():
                    loss = gpt.loss(batch)
                    (loss / num_micro).backward()
                own[micro] = loss.item()
                counts += torch.bincount(batch["dataset_id"].long(), minlength=len(job.prefixes)).numpy()
            optimizer.step()
            of_all = model.exchange(own.view(np.int64)).view(np.float64)  # [ranks, micro-batches]
            losses[step] = float(np.mean(of_all.T.flatten()))
            drawn[step] = model.exchange(counts).sum(axis=0).tolist()
    seconds = time.perf_counter() - started

    optimizer_state = optimizer.full_state_dict()
    if save is not None and rank == 0:
        consumed = last * job.batch_size
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer_state,
            "sampler": sampler.state_dict(consumed_samples=consumed),
        }
        torch.save(state, save)
    return {
        "losses": losses,
        "drawn": drawn,
        "ranks": num_ranks,
        "valid_loss": validate(gpt, valid_data, job.batch_size),
        "data_seconds": data_seconds,
        "samples_per_second": len(losses) * job.batch_size / seconds,
        "parameters": sum(parameter.numel() for parameter in gpt.parameters()),
    }


@torch.no_grad()
def validate(model: GPT, data: Any, batch_size: int) -> float:
    """Mean loss over the validation data, in nats."""
    losses = [model.loss(batch).item() for batch in torch.utils.data.DataLoader(data, batch_size=batch_size)]
    return sum(losses) / len(losses)


def main() -> None:
    """Read the arguments, train, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, help="JSON file with the fields of Job")
    parser.add_argument("--stop-after", type=int, help="steps to train in this process; by default to the end")
    parser.add_argument("--save", type=Path, help="file to leave the state in")
    parser.add_argument("--resume", type=Path, help="file to take the state from")
    parser.add_argument("--losses", type=Path, required=True, help="JSON file for losses and figures")
    arguments = parser.parse_args()
    job = Job(**json.loads(arguments.job.read_text()))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    found = train(job, stop_after=arguments.stop_after, save=arguments.save, resume=arguments.resume)
    if os.environ.get("RANK", "0") == "0":
        arguments.losses.write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
