"""Error of the functions that Megatron Core's programs call."""

from torch.distributed.checkpoint.api import CheckpointException

from trackbed.errors import CheckpointError

__all__ = ["DistributedCheckpointError"]


class DistributedCheckpointError(CheckpointError, CheckpointException):
    """A checkpoint cannot be saved or loaded. Also torch's error, which programs catch that know Megatron Core's.

    Args:
        message: text of the error.
    """

    def __init__(self, message: str) -> None:
        CheckpointException.__init__(self, message, {})

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[type["DistributedCheckpointError"], tuple[str]]:
        """Copies and unpickles from the text."""
        return type(self), (str(self),)
