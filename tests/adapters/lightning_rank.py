"""A rank that trains with Lightning: `lightning_rank.py FOLDER LAST_STEP SAVED`, from one where there is one."""

import os
import sys
from pathlib import Path

import pytorch_lightning as lightning
import torch

from tests.adapters.training import STEP, Model, digests, loss_of, masked, say
from trackbed.adapters.lightning import BlendDataModule, FolderCheckpointIO


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.model = Model()

    def training_step(self, batch):
        labels = masked(batch["labels"], batch["loss_mask"])
        loss = loss_of(self.model(batch["tokens"]), labels)
        say(self.global_step + 1, digests(batch["tokens"], labels), loss)
        return loss

    def validation_step(self, batch):
        self.log("loss", loss_of(self.model(batch["tokens"]), batch["labels"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    folder, last, saved = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    size = int(os.environ["WORLD_SIZE"])
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = os.environ["RANK"], str(size)
    trainer = lightning.Trainer(
        max_steps=last,
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        plugins=[FolderCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        val_check_interval=5,
        limit_val_batches=2,
        default_root_dir=saved.parent,
    )
    data = BlendDataModule(folder / "blend.toml", batch_size=STEP // size)
    trainer.fit(Module(), data, ckpt_path=str(saved) if saved.exists() else None)
    trainer.save_checkpoint(saved)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # torch's wrapper on gloo may hang when it is taken apart


if __name__ == "__main__":
    main()
