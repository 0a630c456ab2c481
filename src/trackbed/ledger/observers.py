"""Observers of a run that hand on what is recorded: to TensorBoard, and to Weights & Biases."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, Final

_NOT_DRAWN: Final = ("step", "first_sample", "batch_hash", "datasets")


class TensorBoardObserver:
    """Writes the numbers of each step as scalars of TensorBoard, and losses of evaluations.

    Args:
        folder: folder of the event files; see `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder)

    def on_step(self, line: Mapping[str, Any]) -> None:
        """Writes the scalars of a step."""
        for name, value in scalars_of(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Writes the loss of an evaluation."""
        for name, value in scalars_of_event(event).items():
            self._writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        """Closes the files."""
        self._writer.close()


class WandbObserver:
    """Logs the numbers of each step to Weights & Biases, and losses of evaluations.

    Args:
        options: arguments of `wandb.init`, such as `project`, and `mode="offline"`.

    Raises:
        ImportError: the package `wandb` is not installed.
    """

    def __init__(self, **options: Any) -> None:
        import wandb

        self._run: Any = wandb.init(**options)

    def on_step(self, line: Mapping[str, Any]) -> None:
        """Logs the numbers of a step."""
        self._run.log(scalars_of(line), step=line["step"])

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Logs the loss of an evaluation."""
        found = scalars_of_event(event)
        if found:
            self._run.log(found, step=event["step"])

    def close(self) -> None:
        """Ends the run there."""
        self._run.finish()


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of the line of a step that can be drawn, by name.

    >>> scalars_of({"step": 1, "loss": 2.5, "grad_norm": None, "datasets": {"3": [512, 2.5]}, "batch_hash": "ab"})
    {'loss': 2.5, 'loss/dataset 3': 2.5, 'tokens/dataset 3': 512}
    """
    found = {
        name: value
        for name, value in line.items()
        if name not in _NOT_DRAWN and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    for number, (tokens, loss) in line.get("datasets", {}).items():
        if loss is not None:
            found[f"loss/dataset {number}"] = loss
        found[f"tokens/dataset {number}"] = tokens
    return found


def scalars_of_event(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns the losses of an evaluation, by name; nothing of other events.

    >>> scalars_of_event({"event": "evaluation", "step": 5, "split": "valid", "loss": 2.5, "datasets": [2.0, None]})
    {'valid/loss': 2.5, 'valid/loss/dataset 0': 2.0}
    """
    if event.get("event") != "evaluation" or "split" not in event:
        return {}
    losses = {"loss": event.get("loss")}
    losses |= {f"loss/dataset {number}": loss for number, loss in enumerate(event.get("datasets") or [])}
    return {f"{event['split']}/{name}": loss for name, loss in losses.items() if loss is not None}
