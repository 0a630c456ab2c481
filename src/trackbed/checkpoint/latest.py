"""The last of several checkpoints in one folder."""

import logging
import re
from pathlib import Path
from typing import Final

from trackbed.checkpoint.folder import local_folder, open_folder
from trackbed.checkpoint.format.dcp_metadata import METADATA_NAME
from trackbed.checkpoint.ranks import Ranks, meet
from trackbed.errors import CheckpointError

__all__ = ["latest_checkpoint"]

logger = logging.getLogger(__name__)

_NUMBER: Final = re.compile(r"[0-9]+\Z")


def latest_checkpoint(folder: str | Path, *, group: Ranks = None) -> Path | None:
    """Collective over `group`: returns the checkpoint in a folder whose name ends with the highest number.

    Names such as `step-0000100`, `iter_0000100` and `100` have a number at their end. Other names are ignored, such as
    that of the `.partial` folder of a save that was killed, and so are folders that hold no checkpoint. One that is not
    whole is passed over with a warning; its tensors are not read. Rank 0 looks, and all ranks return the same path.

    Args:
        folder: folder of the checkpoints. It need not exist.
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.

    Returns:
        Path of the checkpoint, `folder` and its name. None if there is none.

    Raises:
        CheckpointError: on every rank: the folder cannot be read, is a file, or is a checkpoint itself.
    """
    with meet("latest_checkpoint", group) as meeting:
        name = meeting.broadcast(_latest_name(local_folder(folder)).encode() if meeting.rank == 0 else b"").decode()
    return Path(folder) / name if name else None


def _latest_name(folder: Path) -> str:
    """Name of the last checkpoint of a folder; empty if there is none."""
    if folder.is_file():
        msg = f"{folder}: must be a folder of checkpoints, but is a file"
        raise CheckpointError(msg)
    if not folder.is_dir():
        return ""
    found = [
        (int(number[0]), one.name)
        for one in folder.iterdir()
        if (number := _NUMBER.search(one.name)) and (one / METADATA_NAME).is_file()
    ]
    for _, name in sorted(found, reverse=True):
        try:
            open_folder(folder / name)
        except CheckpointError as error:
            logger.warning("%s: is passed over, because it is not whole: %s", folder / name, error)
        else:
            return name
    if (folder / METADATA_NAME).is_file():
        msg = f"{folder}: must be a folder of checkpoints, but is a checkpoint itself: give the folder that it is in"
        raise CheckpointError(msg)
    return ""
