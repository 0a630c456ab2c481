"""Training steps on packs of which a share of the labels is trained: on several ranks, and plainly.

Run as a script with the folder of the pairs and the cases, it is one of several processes. It prints the largest
difference of its parameters from the plain ones, and what it raises where one rank has no counts.
"""

import contextlib
import copy
import json
import os
import sys
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.support.files.blends import EOD, build, gpt_config
from trackbed import BatchLoader, DataParallelOptimizer, DistributedDataParallel, DistributedDataParallelConfig
from trackbed.errors import TrackbedError
from trackbed.loading import slice_for_context
from trackbed.losses import document_mean, step_counts, token_mean
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.trained_tokens import TrainedColumns, runs_of

SHARES = {"0 %": 0.0, "one document": None, "1 %": 0.01, "50 %": 0.5, "99 %": 0.99, "100 %": 1.0}
LENGTH, GLOBAL, STEPS = 32, 8, 2


def write_pair(folder, name):
    """A pair of documents of which a share of the tokens is trained; or all tokens of one document alone."""
    generator = np.random.default_rng(3)
    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), np.uint16)
    builder.trained = TrainedColumns()
    for number, length in enumerate(generator.integers(2, 40, 120).tolist()):
        share = SHARES[name]
        mask = generator.random(length) < (float(number == 0) if share is None else share)
        runs = runs_of(mask)
        builder.add_document(generator.integers(0, EOD + 1, length), [length])
        builder.trained.add(np.array([len(runs)]), runs, lengths=np.array([length]), where="mask")
    builder.finalize(str(folder / f"{name}.idx"))


def dataset_of(folder, name):
    """Two steps of packs, among them that of the document of which alone all is trained."""
    options = {"split": "1", "order": "packed", "sequence_length": LENGTH, "pack_multiple": 4}
    config = gpt_config(None, blend=([str(folder / name)], None), **options)
    return build(config, (STEPS * GLOBAL, 0, 0))[0]


def new_model():
    generator = torch.Generator().manual_seed(0)  # ranks may be threads, which share the global one
    model = torch.nn.Sequential(torch.nn.Embedding(EOD + 1, 6), torch.nn.Linear(6, EOD + 1)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.5, 0.5, generator=generator)
    return model


def losses_of(model, batch):
    logits = model(batch["tokens"])
    return functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), reduction="none")


def optimizer_of(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def plain_steps(data, kind):
    """Parameters after steps of one process, with the mean of tokens, or of means of documents, one by one."""
    model = new_model()
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, documents = [], []
        for position in range(step * GLOBAL, (step + 1) * GLOBAL):
            item = data[position]
            losses, is_trained = losses_of(model, item), item["loss_mask"].bool()
            for start, stop in pairwise(item["cu_seqlens_padded"].tolist()):
                own = losses[start:stop][is_trained[start:stop]]
                tokens.append(own)
                documents.extend([own.mean()] if len(own) else [])
        parts = {"token": torch.cat(tokens), "document": torch.stack(documents) if documents else torch.zeros(0)}[kind]
        if len(parts):
            parts.mean().backward()
        else:
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def steps_of_rank(data, kind, group, *, micro, context=1, is_sharded=False, layout="thd"):
    """Parameters of a rank after the same steps, and the losses of steps, summed over its micro-batches.

    Args:
        data: the dataset.
        kind: "token" or "document".
        group: the ranks; None for those of torch.
        micro: packs of a micro-batch.
        context: ranks that share each pack.
        is_sharded: True to shard the optimizer.
        layout: that of the loader.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if group is None else (group.rank, group.size)
    config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)
    model = DistributedDataParallel(new_model(), config, process_group=group)
    optimizer = DataParallelOptimizer(optimizer_of(model.parameters()), model)
    loader = BatchLoader(
        data, batch_size=micro, layout=layout, rank=rank // context, num_ranks=size // context, num_threads=1
    )
    mean = {"token": token_mean, "document": document_mean}[kind]
    totals, batches = [], iter(loader)
    for _ in range(STEPS):
        own = list(islice(batches, GLOBAL * context // (size * micro)))
        counts = model.step_counts(own, context_size=context)
        if group is None and counts != step_counts(own, context_size=context):
            raise ValueError("the counts over torch's group differ")
        optimizer.zero_grad()
        total = 0.0
        for number, batch in enumerate(own):
            part = slice_for_context(batch, rank % context, context)
            with model.no_sync() if number < len(own) - 1 else contextlib.nullcontext():
                loss = mean(losses_of(model, part), part, counts)
                loss.backward()
            total += loss.item()
        optimizer.step()
        totals.append(total)
    return [copy.deepcopy(param.detach()) for param in model.parameters()], totals


def difference(found, wanted):
    """The largest difference of parameters; NaN if one is NaN."""
    return max((one - other).abs().max().item() for one, other in zip(found, wanted, strict=True))


def main():
    dist.init_process_group("gloo")
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:
        data = dataset_of(folder, name)
        for kind in ("token", "document"):
            wanted = plain_steps(data, kind)
            for is_sharded in (False, True):
                found, totals = steps_of_rank(data, kind, None, micro=1, is_sharded=is_sharded)
                print(json.dumps([name, kind, difference(found, wanted), totals]), flush=True)
    try:
        step_counts([] if dist.get_rank() == 0 else [{"tokens": torch.zeros(1)}])
    except TrackbedError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
