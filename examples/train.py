"""Trains a small GPT on a blend, stops where it is told to, and goes on from the file it left.

    python examples/train.py job.json --stop-after 40 --save state.pt --losses first.json
    python examples/train.py job.json --resume state.pt --losses second.json

`job.json` has the fields of `Job`.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model import GPT, ModelConfig
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, HuggingFaceTokenizer
from trackbed.loading import MegatronPretrainingSampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained on what."""

    prefixes: list[str]
    weights: list[float]
    tokenizer: str
    path_to_cache: str
    steps: int
    batch_size: int
    sequence_length: int
    seed: int = 1234
    valid_samples: int = 64
    learning_rate: float = 1.5e-3


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

    # Else MKL may use fewer threads from one moment to the next, which changes the last bits of a product.
    torch.set_num_threads(torch.get_num_threads())
    torch.manual_seed(job.seed)
    torch.use_deterministic_algorithms(mode=True)
    model = GPT(ModelConfig(vocab_size=vocab_size, sequence_length=job.sequence_length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.01)
    sampler = MegatronPretrainingSampler(len(train_data), 0, job.batch_size, 0, 1, fingerprint=train_data.fingerprint)
    if resume is not None:
        state = torch.load(resume, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])

    first = sampler.consumed_samples // job.batch_size
    last = job.steps if stop_after is None else first + stop_after
    loader = torch.utils.data.DataLoader(train_data, batch_sampler=sampler)
    losses, drawn = {}, {}
    started = time.perf_counter()
    for step, batch in zip(range(first, last), loader, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate * min(1.0, (step + 1) / 20)
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses[step] = loss.item()
        drawn[step] = torch.bincount(batch["dataset_id"].long(), minlength=len(job.prefixes)).tolist()
    seconds = time.perf_counter() - started

    if save is not None:
        consumed = last * job.batch_size
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "sampler": sampler.state_dict(consumed_samples=consumed),
        }
        torch.save(state, save)
    return {
        "losses": losses,
        "drawn": drawn,
        "valid_loss": validate(model, valid_data, job.batch_size),
        "data_seconds": data_seconds,
        "samples_per_second": len(losses) * job.batch_size / seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
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
    found = train(job, stop_after=arguments.stop_after, save=arguments.save, resume=arguments.resume)
    arguments.losses.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
