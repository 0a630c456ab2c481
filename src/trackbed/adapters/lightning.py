"""Data and checkpoints for Lightning, from the package `lightning` or `pytorch_lightning`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trackbed.blends.open import open_blend
from trackbed.checkpoint import load, save
from trackbed.checkpointer.runs import remove_checkpoint
from trackbed.comm import SOLO
from trackbed.datasets import Batch
from trackbed.errors import ArgumentError
from trackbed.files.stores import is_address
from trackbed.loading.loader import BatchLoader

if TYPE_CHECKING or "pytorch_lightning" in sys.modules:  # the one that the program uses: they share no classes
    from lightning_fabric.plugins import CheckpointIO
    from pytorch_lightning import LightningDataModule
else:
    try:
        from lightning.fabric.plugins import CheckpointIO
        from lightning.pytorch import LightningDataModule
    except ModuleNotFoundError:
        from lightning_fabric.plugins import CheckpointIO
        from pytorch_lightning import LightningDataModule


class _Batches:
    """A `BatchLoader` as Lightning takes one that is not torch's: it would ask for torch's samplers."""

    def __init__(self, loader: BatchLoader, *, begins_anew: bool) -> None:
        self.loader = loader
        self._begin = loader.state_dict() if begins_anew else None

    def __iter__(self) -> Iterator[Batch]:
        if self._begin is not None:
            self.loader.load_state_dict(self._begin)
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(self._begin or state)


class BlendDataModule(LightningDataModule):
    """Batches of the splits of a blend file, each rank its own part.

    Its state in Lightning's checkpoints is the position of training, behind which a run goes on, on any number of
    ranks. It refuses other data. Each validation, and with `overfit_batches` each epoch, is of the same samples.

    Args:
        blend: path of the blend file; see `trackbed.open_blend`.
        batch_size: samples of a rank and step, at least 1.
        loader: further options of `trackbed.BatchLoader`, such as `ahead` and `device`.
    """

    def __init__(self, blend: str | Path, *, batch_size: int, **loader: Any) -> None:
        super().__init__()
        self._blend, self._options = blend, {"batch_size": batch_size, **loader}
        self._train: BatchLoader | None = None
        self._position: dict[str, Any] | None = None

    def setup(self, stage: str) -> None:
        """Opens the blend, once the ranks have started."""
        self.splits = open_blend(self._blend)

    def train_dataloader(self) -> Any:
        """Returns the batches of the training split."""
        position = self.state_dict()
        self._train = BatchLoader(self.splits.train, **self._options)
        if position:
            self._train.load_state_dict(position)
        return _Batches(self._train, begins_anew=bool(getattr(self.trainer, "overfit_batches", 0)))

    def val_dataloader(self) -> Any:
        """Returns the batches of each dataset of validation that has samples."""
        found = [BatchLoader(one, **self._options) for one in self.splits.validation_sets if one]
        return [_Batches(loader, begins_anew=True) for loader in found]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of training."""
        return self._train.state_dict() if self._train is not None else self._position or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a position for the loader that is made next."""
        self._position, self._train = state_dict, None


class FolderCheckpointIO(CheckpointIO):
    """Has Lightning save its checkpoints as folders of `trackbed.save`: whole or not at all, with checksums.

    Lightning calls it on rank 0 alone, with a state that is whole there: of strategies that divide a model, such as
    FSDP with sharded states, the checkpoints go their own ways.

        Trainer(plugins=[FolderCheckpointIO()])
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Saves a state as the folder or address `path`. A value of a class that is not allowed is an error."""
        if storage_options is not None:
            raise ArgumentError(f"storage_options: must be None, found {storage_options!r}")
        if not is_address(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        save(checkpoint, path, group=SOLO)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        """Loads a state into the host's memory, on each rank by itself. Only allowed classes are unpickled."""
        return load(path, group=SOLO)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint, if it is there. Anything else at `path` is a CheckpointError."""
        remove_checkpoint(path)  # a run that goes on removes what the one before it may have removed
