"""Data for the `Trainer` of transformers, from release 5 on, with its position in the `Trainer`'s own checkpoints.

In a program:

    data = TrainerDataset(trackbed.open_blend("blend.toml").train)
    arguments = TrainingArguments("out", max_steps=1000, **OPTIONS)
    Trainer(model, arguments, train_dataset=data, callbacks=[TrainerPosition(data)]).train()
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from trackbed.datasets.batches.reader import ReadsBatches, check_split
from trackbed.errors import ArgumentError
from trackbed.kernels.integers import check_at_least
from trackbed.loading.samplers import sampler_of_positions

OPTIONS: Final = {"train_sampling_strategy": "sequential", "dataloader_drop_last": True}
"""Options of `TrainingArguments` with which the `Trainer` reads samples in order."""


class TrainerDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Map-style dataset whose samples have `input_ids` and `labels`, int64 `[S]`, for models that shift their labels.

    Labels are the tokens, or -100 where the loss mask is 0. A sample does not have the label of its last token, so that
    one prediction of each is left out. `dataset` is that of a split, such as `trackbed.open_blend(path).train`.
    """

    def __init__(self, dataset: ReadsBatches) -> None:
        check_split(dataset)
        self.dataset = dataset
        # Worker processes that live longer than an epoch see it, too.
        self.first: torch.Tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        """`[1]` position in the dataset of the first sample that the `Trainer` asks for."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Returns a sample, counted from `first` on; behind the last one, the first one comes again."""
        return self.__getitems__([index])[0]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(self.__getitem__, range(len(self)))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Returns samples, gathered together. Called by torch's DataLoader."""
        first = int(self.first)
        batch = self.dataset.gather([(first + index) % len(self.dataset) for index in indices], num_threads=1)
        labels = batch["tokens"].clone()
        labels[:, 1:][batch["loss_mask"][:, :-1] == 0] = -100  # the mask is that of the prediction of the next token
        return [{"input_ids": tokens, "labels": of_one} for tokens, of_one in zip(batch["tokens"], labels, strict=True)]


class TrainerPosition(TrainerCallback, ExportableState):
    """Callback that counts the samples, and keeps the count and what they are made of in `trainer_state.json`.

    A run that resumes goes on behind the last sample that was trained on, on any number of ranks and with any batch
    size, and reads nothing again. It refuses another dataset. `data` is the `train_dataset` of the `Trainer`.
    """

    def __init__(self, data: TrainerDataset | None = None) -> None:
        if not isinstance(data, TrainerDataset):
            hint = "; leave restore_callback_states_from_checkpoint out" if data is None else ""
            raise ArgumentError(f"data must be the TrainerDataset of training, found {data!r}{hint}")
        self._data = data
        self._sampler = sampler_of_positions(data.dataset)
        self._consumed = 0  # samples that all ranks have trained on

    def state(self) -> dict[str, Any]:
        """Returns the position, for the checkpoint."""
        passes, consumed = divmod(self._consumed, len(self._data))
        position = {**self._sampler.state_dict(consumed_samples=consumed), "passes": passes}
        return {"args": {}, "attributes": {"position": position}}

    def on_init_end(self, args: Any, *unused: Any, **kwargs: Any) -> None:
        """Has the `Trainer` skip nothing itself. Without this callback it reads again what it was trained on."""
        args.ignore_data_skip = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the position of the checkpoint that the `Trainer` has loaded, which must be of the same data."""
        for name, wanted in {**OPTIONS, "ignore_data_skip": True}.items():  # which `on_init_end` sets
            if getattr(args, name) != wanted:
                raise ArgumentError(f"TrainingArguments: {name} must be {wanted!r}, found {getattr(args, name)!r}")
        loader = kwargs["train_dataloader"]
        if getattr(loader, "dataset", None) is not self._data or not hasattr(loader, "total_batch_size"):
            wanted = "the train_dataset of the Trainer, which each rank reads by itself (dispatch_batches=False)"
            raise ArgumentError(f"data must be {wanted}, found a {type(loader).__name__} of another dataset")
        self._consumed = 0
        if not state.global_step:
            return
        callbacks: Any = state.stateful_callbacks or {}  # a dictionary, as it was read from JSON
        saved = callbacks.get(type(self).__name__)
        if saved is None:
            raise ArgumentError("the checkpoint must have the state of a TrainerPosition, found none: begin anew")
        try:
            position = saved["attributes"]["position"]
            check_at_least(0, passes=position["passes"])
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"the checkpoint must have the whole state of one TrainerPosition: {error!r}") from None
        self._sampler.load_state_dict(position)
        self._consumed = position["passes"] * len(self._data) + self._sampler.consumed_samples

    def on_epoch_begin(self, *unused: Any, **kwargs: Any) -> None:
        """Has the next pass begin behind the last sample."""
        self._data.first.fill_(self._consumed % len(self._data))
        loader = getattr(kwargs["train_dataloader"], "base_dataloader", kwargs["train_dataloader"])
        if loader.generator is None:
            # A pass draws a seed. A run that resumes begins one more, and must not drop out other values for it.
            loader.generator = torch.Generator().manual_seed(0)

    def on_substep_end(self, *unused: Any, **kwargs: Any) -> None:
        """Counts a micro-batch of all ranks."""
        self._consumed += kwargs["train_dataloader"].total_batch_size

    on_step_end = on_substep_end  # the last one of a step
