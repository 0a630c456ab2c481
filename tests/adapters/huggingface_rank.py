"""A rank that trains with the `Trainer`: `huggingface_rank.py FOLDER LAST_STEP OUT`. It resumes where it can."""

import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import trackbed
from tests.adapters.training import SEQUENCE, STEP, STEPS, digests, say
from trackbed.adapters.huggingface import OPTIONS, TrainerDataset, TrainerPosition


class Said(Trainer):
    """Says what each step is made of."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        say(self.state.global_step + 1, digests(inputs["input_ids"], inputs["labels"]), loss)
        return loss


class Stop(TrainerCallback):
    """Saves and ends a run at a step."""

    def __init__(self, last):
        self.last = last

    def on_step_end(self, args, state, control, **unused):
        control.should_training_stop = control.should_save = state.global_step == self.last


def main():
    folder, last, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    data = TrainerDataset(trackbed.open_blend(folder / "blend.toml").train)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=SEQUENCE, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        str(out),
        max_steps=STEPS,
        per_device_train_batch_size=STEP // int(os.environ["WORLD_SIZE"]),
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **OPTIONS,
    )
    trainer = Said(model, arguments, train_dataset=data, callbacks=[TrainerPosition(data)])
    resumed = any(out.glob("checkpoint-*"))

    trainer.add_callback(Stop(last))
    trainer.train(resume_from_checkpoint=resumed)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # torch's wrapper on gloo may hang when it is taken apart


if __name__ == "__main__":
    main()
