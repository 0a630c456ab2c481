"""Reading of whole files of a checkpoint: regular files only, as opening a pipe or reading a device may never end."""

import os
from pathlib import Path

from trackbed.errors import CheckpointError, FormatError
from trackbed.files.regular import open_regular

__all__ = ["maybe_read_file", "open_file"]


def open_file(folder: Path, name: str) -> tuple[int, int]:
    """Opens a regular file of a checkpoint. Returns its descriptor, and its size in bytes.

    Raises:
        CheckpointError: there is a folder, a pipe, a device or a socket in its place.
        OSError: the file cannot be opened.
    """
    try:
        return open_regular(folder / name)
    except FormatError as error:
        raise CheckpointError(str(error).removeprefix(f"{folder}/")) from error


def maybe_read_file(folder: Path, name: str) -> bytes | None:
    """Reads a file of a checkpoint; None if there is none.

    Raises:
        CheckpointError: it is no regular file, cannot be read, or does not fit into memory.
    """
    try:
        descriptor, _ = open_file(folder, name)
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        msg = f"{name}: must be a file that can be read, but is not: {error.strerror}"
        raise CheckpointError(msg) from error
    except MemoryError as error:
        msg = f"{name}: must fit into memory, but does not"
        raise CheckpointError(msg) from error
