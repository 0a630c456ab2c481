"""Trains a small GPT on a blend, stops where it is told to, and continues on any number of ranks.

    torchrun --nproc-per-node 2 examples/train.py blend.toml --stop-after 40 --save checkpoint --losses first.json
    python examples/train.py blend.toml --resume checkpoint --losses second.json

Micro-batch j of a step belongs to rank j mod n of n ranks, so two ranks with one micro-batch have the losses of one
rank with two, to the last bit.
"""

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from model import GPT, ModelConfig

import trackbed


def train(
    blend: Path, *, steps: int, batch_size: int, micro_batch_size: int, stop_after: int | None, resume: Path | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train to the end, or for `stop_after` steps. Returns losses and figures, and the state."""
    started = time.perf_counter()
    splits = trackbed.open_blend(blend)
    loader = trackbed.BatchLoader(splits.train, batch_size=micro_batch_size)
    data_seconds = time.perf_counter() - started

    # Another number of threads would change the last bits of a product.
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(mode=True)
    data = splits.train.config
    gpt = GPT(ModelConfig(vocab_size=data.tokenizer.vocab_size, sequence_length=data.sequence_length))
    config = trackbed.DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=500_000
    )
    model = trackbed.DistributedDataParallel(gpt, config)
    adamw = torch.optim.AdamW(gpt.parameters(), lr=6e-4, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: min(1.0, (step + 1) / 20))
    optimizer = trackbed.DataParallelOptimizer(adamw, model, max_norm=1.0)
    first = 0
    if resume is not None:
        state = trackbed.load_sharded_state(resume, model, optimizer)
        loader.load_state_dict(state["loader"])
        warmup.load_state_dict(state["warmup"])
        first = state["step"]

    last = steps if stop_after is None else first + stop_after
    num_datasets = len(splits.train.datasets)
    num_micro = batch_size // micro_batch_size // loader.num_ranks
    batches = iter(loader)
    losses, drawn = {}, {}
    started = time.perf_counter()
    with model.guarded():
        for step in range(first, last):
            optimizer.zero_grad()
            own, sources = torch.zeros(num_micro, dtype=torch.float64), torch.zeros(num_datasets, dtype=torch.int64)
            for micro in range(num_micro):
                batch = next(batches)
                with contextlib.nullcontext() if micro == num_micro - 1 else model.no_sync():
                    loss = gpt.loss(batch)
                    (loss / num_micro).backward()
                own[micro] = loss.item()
                sources += torch.bincount(batch["dataset_id"].long(), minlength=num_datasets)
            optimizer.step()
            warmup.step()
            losses[step] = of_all_ranks(own).T.flatten().mean().item()  # in the order of the micro-batches
            drawn[step] = of_all_ranks(sources).sum(dim=0).tolist()
    seconds = time.perf_counter() - started
    figures = {
        "losses": losses,
        "drawn": drawn,
        "ranks": loader.num_ranks,
        "valid_loss": validate(gpt, splits.valid, batch_size),
        "data_seconds": data_seconds,
        "samples_per_second": len(losses) * batch_size / seconds,
        "parameters": sum(parameter.numel() for parameter in gpt.parameters()),
    }
    position = {"loader": loader.state_dict(), "warmup": warmup.state_dict(), "step": last}
    return figures, {**trackbed.sharded_state(model, optimizer), **position}


def of_all_ranks(values: torch.Tensor) -> torch.Tensor:
    """`[ranks, K]` values of all ranks, of the `[K]` values of each."""
    if not torch.distributed.is_initialized():
        return values[None]
    found = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, values)
    return torch.stack(found)


@torch.no_grad()
def validate(model: GPT, data: Any, batch_size: int) -> float:
    """Mean loss over the validation data, in nats. Every rank reads all of them."""
    loader = trackbed.BatchLoader(data, batch_size=batch_size, rank=0, num_ranks=1)
    losses = [model.loss(batch).item() for batch in loader]
    return sum(losses) / len(losses)


def main() -> None:
    """Read the arguments, train, and write the losses and the state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blend", type=Path, help="blend file, with samples for all steps")
    parser.add_argument("--steps", type=int, default=80, help="steps of the whole training")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a step, on all ranks")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="samples of a forward pass")
    parser.add_argument("--stop-after", type=int, help="steps to train in this process; by default to the end")
    parser.add_argument("--save", type=Path, help="folder to save the state in, which does not exist yet")
    parser.add_argument("--resume", type=Path, help="folder of a saved state")
    parser.add_argument("--losses", type=Path, required=True, help="JSON file for losses and figures")
    arguments = vars(parser.parse_args())
    save, path = arguments.pop("save"), arguments.pop("losses")
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    figures, state = train(**arguments)
    if save is not None:
        trackbed.save(state, save)
    if os.environ.get("RANK", "0") == "0":
        path.write_text(json.dumps(figures))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
