"""Batches and checkpoints for torchtitan: release 0.3.0, and its main branch of August 2026.

In the configuration of a run:

    config.dataloader = BlendDataLoader.Config(blend="blend.toml")
    config.checkpoint = FolderCheckpointManager.Config(enable=True, interval=500)

Shapes: B samples of a batch, S tokens of a sample.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

from trackbed.blends.open import open_blend
from trackbed.checkpoint import ShardedTensor, latest_checkpoint, load
from trackbed.checkpointer import Checkpointer
from trackbed.datasets.blend.dataset import SplitDataset
from trackbed.errors import ArgumentError
from trackbed.loading.loader import BatchLoader

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ModuleNotFoundError:  # the main branch
    from torchtitan.components.data.loader import BaseDataLoader

_NOT_HONOURED = ("initial_load_in_hf", "initial_load_in_hf_quantized", "last_save_in_hf")


class BlendDataLoader(BaseDataLoader):
    """Batches of a blend, of this data-parallel rank. Its position resumes on another number of them.

    Labels are -100 where the loss mask is 0. Tensors are `[B, S]` in release 0.3.0, and `[B * S]` on the main branch.

    Args:
        config: the blend.
        dp_world_size: number of data-parallel ranks.
        dp_rank: this one.
        sizes: of release 0.3.0, `seq_len`, which is S, and `local_batch_size`, B; of the main branch,
            `max_context_length`, the most tokens of a sample, and `num_tokens_per_batch`, B * S. Others are not used.

    Raises:
        ArgumentError: the samples of the blend have another length.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The data of a run."""

        blend: str = ""
        """Path of the blend file; see `trackbed.open_blend`."""
        split: Literal["train", "valid", "test"] = "train"
        """Split that is read. "train" goes on where the last loop has ended, the others begin anew."""
        ahead: int = 2
        """Batches to read ahead, at least 1."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **sizes: Any) -> None:
        if not config.blend:
            raise ArgumentError("dataloader.blend must be the path of a blend file, found none")
        self._dataset: SplitDataset = getattr(open_blend(config.blend), config.split)
        length: int = self._dataset.config.sequence_length
        self._is_flat = "num_tokens_per_batch" in sizes
        batch_size = sizes.get("local_batch_size")
        if self._is_flat:
            most, num_tokens = sizes["max_context_length"], sizes["num_tokens_per_batch"]
            batch_size = num_tokens // length
            wanted = f"at most max_context_length {most}, and divide num_tokens_per_batch {num_tokens}"
            fits = num_tokens % length == 0 and length <= most
        else:
            wanted, fits = f"training.seq_len {sizes['seq_len']}", length == sizes["seq_len"]
        if not fits:
            raise ArgumentError(f"{config.blend}: sequence_length must be {wanted}, found {length}")
        place = {"rank": dp_rank, "num_ranks": dp_world_size}
        self._options: dict[str, Any] = {"batch_size": batch_size, "ahead": config.ahead, **place}
        self._goes_on = config.split == "train"
        self._loader = BatchLoader(self._dataset, **self._options)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Iterates over inputs and labels."""
        for batch in self._loader if self._goes_on else BatchLoader(self._dataset, **self._options):
            labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORE_INDEX)
            inputs = {"input": batch["tokens"], "positions": batch["position_ids"]}
            if self._is_flat:
                inputs, labels = {name: one.flatten() for name, one in inputs.items()}, labels.flatten()
            yield inputs, labels

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch, the same on all ranks."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on behind a position. Raises an `ArgumentError` for that of other data."""
        self._loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Ends reading ahead."""
        self._loader.close()


class FolderCheckpointManager(BaseCheckpointManager):
    """Saves in the background with a `trackbed.Checkpointer`: checkpoints appear whole or not at all, with checksums.

    It goes on from checkpoints of torchtitan's own manager, too, in the same folders `step-N`. Without `load_step` the
    newest whole checkpoint is loaded. All fields of torchtitan's `Config` are honoured but those for files of Hugging
    Face, which are refused: `trackbed ckpt export` writes such files.

    torchtitan gives it the rest: its states, and `base_folder`, which may be an address of an object store.

    Raises:
        ArgumentError: a field that is not honoured is set.
        CheckpointError: another job keeps checkpoints in the folder.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Policies of torchtitan, and options of `trackbed.Checkpointer`."""

        snapshot: Literal["copied", "deferred"] = "copied"
        writer: Literal["thread", "process"] = "thread"
        mirror: str | None = None

    def __init__(
        self,
        config: Config,
        *,
        dataloader: BaseDataLoader | None,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        for name in _NOT_HONOURED:
            if getattr(config, name):
                raise ArgumentError(f"checkpoint.{name} must be False, found True: Trackbed writes no such files")
        self._config = config
        self.folder = filesystem.join(base_folder, config.folder)
        self.keep_latest_k = config.keep_latest_k
        parts = {OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers, DATALOADER: dataloader}
        self._states = {**states, **{name: part for name, part in parts.items() if part is not None}}
        unknown = set(config.exclude_from_loading) - set(self._states)
        if unknown:
            raise ArgumentError(f"checkpoint.exclude_from_loading must name {', '.join(self._states)}, found {unknown}")
        self._model = ModelWrapper(model_parts)
        self._checkpointer: Checkpointer | None = None
        if not config.load_only:
            options: dict[str, Any] = {"snapshot": config.snapshot, "writer": config.writer, "mirror": config.mirror}
            keep_last = config.keep_latest_k or None
            self._checkpointer = Checkpointer(self.folder, keep_last=keep_last, pattern="step-{step}", **options)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - as torchtitan has it
        """Begins a save if one is due. Called after each step."""
        config = self._config
        if self._checkpointer is None:
            return False
        self._checkpointer.poll()
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if not (last_step or is_first or curr_step % config.interval == 0):
            return False
        if last_step and config.last_save_model_only:
            dtype = TORCH_DTYPE_MAP[config.export_dtype]
            model = self._model.state_dict()
            state = _described({name: one.to(dtype) if one.is_floating_point() else one for name, one in model.items()})
        else:
            state = self._state()
        self._checkpointer.save(curr_step, state)
        self.save_future = Future()
        if last_step:
            self._wait_for_saving()
        return True

    def _state(self, excluded: Sequence[str] = ()) -> dict[str, Any]:
        """What is saved, and what is loaded: the model's tensors by name beside the other parts."""
        state = {name: part for name, part in self._states.items() if name not in excluded}
        if OPTIMIZER in state:
            state[OPTIMIZER] = _described(self._states[OPTIMIZER].state_dict(), f"{OPTIMIZER}.")
        return {**_described(self._model.state_dict()), **state}

    def _load(self, step: int = -1) -> bool:
        """Loads a step, or else the newest one, or else `initial_load_path`."""
        config = self._config
        found = self._folder_of(step)
        if found is None and not config.initial_load_path:
            return False
        is_model_only = found[0] == 0 if found is not None else config.initial_load_model_only
        state = self._state([*self._states] if is_model_only else config.exclude_from_loading)
        if found is not None and self._checkpointer is not None:
            loaded = self._checkpointer.load(state, found[0]) or {}
        else:
            loaded = load(state, str(config.initial_load_path) if found is None else found[1])
        self._model.load_state_dict(self._model.state_dict())  # hooks take apart what they have put together
        if OPTIMIZER in state:
            self._states[OPTIMIZER].load_state_dict(loaded[OPTIMIZER])
        return True

    def _folder_of(self, step: int) -> tuple[int, str] | None:
        """Number and folder of the checkpoint of a step, or of the newest one for -1; None if there is none."""
        if self._checkpointer is not None:
            found = self._checkpointer.latest(verified=True) if step == -1 else step
            return None if found is None else (found, str(self._checkpointer.path(found)))
        newest = latest_checkpoint(self.folder) if step == -1 else f"{self.folder}/step-{step}"
        return None if newest is None else (int(str(newest).rpartition("-")[2]), str(newest))

    def _wait_for_saving(self) -> None:
        """Waits for the save in flight."""
        if self._checkpointer is not None:
            self._checkpointer.wait()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        """Waits for copies, before the next step of the optimizers."""
        if self._checkpointer is not None:
            with self._checkpointer.lock():
                pass

    def _close(self) -> None:
        """Waits for the save in flight, and ends the threads."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def _described(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Describes the tensors of a flat state as copies that all ranks have, if none is a `DTensor`."""
    if any(isinstance(one, DTensor) for one in state.values()):
        return state
    rank = dist.get_rank() if dist.is_initialized() else 0
    entries = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    entry = partial(ShardedTensor.from_rank_offsets, replica_id=rank)
    return {**state, **{name: entry(f"{prefix}{name}", one) for name, one in entries.items()}}
