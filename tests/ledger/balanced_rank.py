"""One rank of a recorded run whose steps are balanced: `balanced_rank.py BLEND RUN`.

Writes a JSON line: for each step, the SHA-256 of the tokens of each sample that this rank was fed; and the largest
difference between the gradients of the step with and without balance.
"""

import hashlib
import itertools
import json
import os
import sys

import torch
import torch.distributed as dist

import trackbed
from trackbed.losses import step_counts, token_mean

STEPS, MICRO = 3, 4


def gradients(batches):
    """Gradients of the mean loss of a step's trained tokens, of a small model in float64."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1000)).double()
    counts = step_counts(batches)
    for batch in batches:
        losses = torch.nn.functional.cross_entropy(
            model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        token_mean(losses, batch, counts).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return [parameter.grad for parameter in model.parameters()]


def next_step(batches):
    return [{name: one.clone() for name, one in batch.items()} for batch in itertools.islice(batches, MICRO)]


def main():
    blend, place = sys.argv[1:]
    dist.init_process_group("gloo")
    fed, worst = {}, 0.0
    with trackbed.open_run(place, blend=blend) as run:
        skip = [[20, 30]]
        balanced = run.loader(
            batch_size=2, skip=skip, balanced=True, global_batch_size=2 * MICRO * dist.get_world_size(), hidden_size=2
        )
        own, plain = iter(balanced), iter(trackbed.BatchLoader(run.train, batch_size=2, skip=skip))
        for _ in range(STEPS):
            batches, others = next_step(own), next_step(plain)
            found, wanted = gradients(batches), gradients(others)
            worst = max(worst, *((one - two).abs().max().item() for one, two in zip(found, wanted, strict=True)))
            tokens = torch.cat([batch["tokens"] for batch in batches])
            is_other = not torch.equal(tokens, torch.cat([batch["tokens"] for batch in others]))
            run.record(tokens.double().mean(1))
            fed[run.step] = [hashlib.sha256(row.numpy().astype("<i8").tobytes()).hexdigest() for row in tokens]
        norm = max(one.abs().max().item() for one in wanted)
    print(json.dumps({"fed": fed, "worst": worst, "largest": norm, "is_other": is_other}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
