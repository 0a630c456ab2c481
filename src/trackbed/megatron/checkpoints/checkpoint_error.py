"""Error of the functions that Megatron Core's programs call."""

from torch.distributed.checkpoint.api import CheckpointException

from trackbed.errors import CheckpointError, TrackbedError


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
        return DistributedCheckpointError, (str(self),)

    @classmethod
    def caused_by(cls, message: str, cause: Exception | None) -> "DistributedCheckpointError":
        """Creates an error that is also of the class of its cause, which programs for Megatron Core catch.

        >>> error = DistributedCheckpointError.caused_by("load: rank 0: no", FileNotFoundError(2, "no", "a"))
        >>> isinstance(error, FileNotFoundError), str(error), error.filename
        (True, 'load: rank 0: no', 'a')
        """
        kind = type(cause)
        if cause is None or isinstance(cause, TrackbedError | StopIteration):  # which must not leave a generator
            return cls(message)
        try:
            both = type(cls.__name__, (cls, kind), {"__init__": BaseException.__init__, "__module__": cls.__module__})
            error: DistributedCheckpointError = both(message)
        except TypeError:  # a class that no other can be joined with, or that takes other arguments
            return cls(message)
        vars(error).update(vars(cause))
        if isinstance(cause, OSError):
            for name in ("errno", "strerror", "filename", "filename2"):
                setattr(error, name, getattr(cause, name))
        return error
