"""Fine-tunes a small GPT on conversations: from raw JSON lines to a recorded run that resumes by itself.

    python examples/finetune_chat.py --output chat-out
    torchrun --nproc-per-node 2 examples/finetune_chat.py --output chat-out

Writes conversations about Python as JSON lines, trains a tokenizer, renders them with a chat template whose marks say
what the assistant has said, and trains on that alone. A sample holds whole conversations, which do not see each other.
Nothing is packed beforehand: `order = "packed"` in the blend file is all. The loss is the mean over all trained tokens
of a step, on any number of ranks. Started again, it goes on behind the newest checkpoint, on 1, 2 or 4 ranks, with the
same conversations in each step. `trackbed show --run chat-out/run --step 5 --lines` shows those.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from corpora import topics
from model import GPT, ModelConfig

import trackbed
from trackbed.losses import StepCounts, token_mean
from trackbed.preprocess import (
    ChatConfig,
    PreprocessConfig,
    TrainingConfig,
    open_tokenizer,
    preprocess,
    train_tokenizer,
)

STEPS, GLOBAL_BATCH, MICRO_BATCH, LENGTH, CHECKPOINT_EVERY = 60, 8, 2, 256, 10
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>{% endif %}

{% endfor %}"""
BLEND = f"""version = 1
sequence_length = {LENGTH}
tokenizer = "tokenizer.json"
order = "packed"
seed = 1234
size = {{train = {STEPS * GLOBAL_BATCH}}}

[[dataset]]
path = "talks_chat_document"
splits = ["train"]
"""
Batch = Mapping[str, torch.Tensor]


def conversations() -> Iterator[list[dict[str, str]]]:
    """Conversations of some turns, each about a topic of Python's help."""
    for text in topics():
        title, *parts = [part.strip() for part in text.split("\n\n") if part.strip()]
        messages = [{"role": "system", "content": "You explain Python."}]
        for number, part in enumerate(parts[:12]):
            question = f"What is there to know about {title.splitlines()[0].lower()}?" if not number else "Go on."
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": part}]
            if number % 3 == 2:
                yield messages
                messages = messages[:1]
        if len(messages) > 1:
            yield messages


def prepare(folder: Path) -> None:
    """Writes the conversations, a tokenizer, the pair with its mask, and the blend file, unless all of it is there."""
    if (folder / "blend.toml").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    talks = folder / "talks.jsonl"
    with talks.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": messages}) + "\n" for messages in conversations())
    with (folder / "texts.txt").open("w", encoding="utf-8") as file:
        file.writelines(topics())
    training = TrainingConfig(inputs=(folder / "texts.txt",), vocab_size=2048, special_tokens=SPECIAL)
    train_tokenizer(training, folder / "tokenizer.json")
    (folder / "template.jinja").write_text(TEMPLATE)
    chat = ChatConfig(template=folder / "template.jinja")
    job = PreprocessConfig(inputs=(talks,), output=str(folder / "talks"), chat=chat, keep_sources=True, workers=1)
    report = preprocess(job, open_tokenizer(folder / "tokenizer.json", special_tokens=True))
    (made,) = report.outputs
    print(f"{made.documents} conversations, {made.tokens} tokens, {made.trained} of them trained", flush=True)
    (folder / "blend.toml").write_text(BLEND)  # last: then everything is there


def own_documents(batch: Batch) -> torch.Tensor:
    """`[B, 1, S, S]` True where a place may see another one: an earlier one of its own conversation."""
    segments = (batch["position_ids"] == 0).cumsum(1)
    return (segments[:, None, :, None] == segments[:, None, None, :]).tril()


def loss_of(model: torch.nn.Module, batch: Batch, counts: StepCounts) -> torch.Tensor:
    """This batch's part of the mean loss of the step."""
    logits = model(batch["tokens"], batch["position_ids"], own_documents(batch))
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return token_mean(losses, batch, counts)


def train(run: trackbed.Run, checkpointer: trackbed.Checkpointer) -> None:
    """Trains from the newest checkpoint on, to the last step or to a signal."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    vocab_size = run.train.config.tokenizer.vocab_size
    gpt = GPT(ModelConfig(vocab_size=vocab_size, sequence_length=LENGTH, width=96, heads=4, layers=3))
    options = trackbed.DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    model = trackbed.DistributedDataParallel(gpt, options)
    optimizer = trackbed.DataParallelOptimizer(torch.optim.AdamW(gpt.parameters(), lr=2e-3), model, max_norm=1.0)
    loader = run.loader(batch_size=MICRO_BATCH)
    num_micro, rest = divmod(GLOBAL_BATCH, MICRO_BATCH * loader.num_ranks)
    if rest:
        sys.exit(f"the number of ranks must divide {GLOBAL_BATCH // MICRO_BATCH}, found {loader.num_ranks}")
    step = checkpointer.latest(verified=True)
    if step is not None:
        run.load_state_dict(checkpointer.load_sharded_state(model, optimizer, step=step)["run"])
    batches = iter(loader)
    with model.guarded():
        while run.step < STEPS:
            micro = [next(batches) for _ in range(num_micro)]
            counts = model.step_counts(micro)
            loss = torch.zeros(())
            for number, batch in enumerate(micro):
                part = loss_of(model, batch, counts)
                if number < num_micro - 1:
                    with model.no_sync():
                        part.backward()
                else:
                    part.backward()
                loss += part.detach()
            report = optimizer.step()
            optimizer.zero_grad()
            run.record(loss, grad_norm=report.norm, trained_tokens=float(counts.num_trained_tokens))
            if loader.rank == 0 and run.step % CHECKPOINT_EVERY == 0:
                print(f"step {run.step} of {STEPS}: {counts.num_trained_tokens} trained labels", flush=True)
            is_over = checkpointer.poll(run.step) or run.step == STEPS
            if is_over or run.step % CHECKPOINT_EVERY == 0:
                state = {**trackbed.sharded_state(model, optimizer), "run": run.state_dict()}
                checkpointer.save(run.step, state)
            if is_over:
                return


def main() -> int:
    """Prepares the data on one rank, and trains on all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("chat-out"), help="folder for everything that is made")
    folder = parser.parse_args().output
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        prepare(folder)
    if dist.is_initialized():
        dist.barrier()
    with (
        trackbed.open_run(folder / "run", blend=folder / "blend.toml") as run,
        trackbed.Checkpointer(folder / "checkpoints", keep_last=2) as checkpointer,
    ):
        checkpointer.save_on_signal(signal.SIGTERM)
        train(run, checkpointer)
    if rank == 0:
        lines = [json.loads(line) for line in (folder / "run" / "steps.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        print(
            f"{run.step} of {STEPS} steps, loss {losses[0]:.2f} at the first, {losses[-1]:.2f} at the last", flush=True
        )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
