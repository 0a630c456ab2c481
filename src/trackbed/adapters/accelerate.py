"""The position of a loader in the checkpoints of Hugging Face's accelerate."""

from accelerate import Accelerator

from trackbed.errors import ArgumentError
from trackbed.loading.loader import BatchLoader


def register_loader(accelerator: Accelerator, loader: BatchLoader) -> None:
    """Has `save_state` save the position of a loader, and `load_state` go on behind it, on any number of ranks.

    `accelerator.prepare` leaves a `BatchLoader` as it is, and forgets its position: this takes its place. Call it once
    for each loader, before `load_state` and in the same order in every run. A state of other data is refused.

        loader = trackbed.BatchLoader(trackbed.open_blend("blend.toml").train, batch_size=8)
        register_loader(accelerator, loader)

    Args:
        accelerator: the `Accelerator` of the program.
        loader: the loader, created after the `Accelerator`, so that it knows the ranks.

    Raises:
        ArgumentError: an argument is of another kind, or the loader divides samples among other ranks than the
            `Accelerator` has.
    """
    if not isinstance(accelerator, Accelerator):
        raise ArgumentError(f"accelerator must be an Accelerator, found a {type(accelerator).__name__}")
    if not isinstance(loader, BatchLoader):
        raise ArgumentError(f"loader must be a BatchLoader, found a {type(loader).__name__}")
    if accelerator.num_processes % loader.num_ranks or loader.rank >= accelerator.num_processes:
        raise ArgumentError(
            f"loader must be made for num_ranks that divide the {accelerator.num_processes} processes of the "
            f"Accelerator, found {loader.num_ranks}: create it after the Accelerator"
        )
    accelerator.register_for_checkpointing(loader)
