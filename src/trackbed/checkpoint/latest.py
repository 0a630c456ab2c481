"""The last of several checkpoints in one folder."""

import re
from pathlib import Path
from typing import Final

from trackbed.checkpoint.meeting import Ranks, meet
from trackbed.checkpoint.metadata_pickle import METADATA_NAME

__all__ = ["latest_checkpoint"]

_NUMBER: Final = re.compile(r"[0-9]+\Z")


def latest_checkpoint(folder: str | Path, *, group: Ranks = None) -> Path | None:
    """Collective over `group`: returns the checkpoint in a folder whose name ends with the highest number.

    Names such as `step-0000100`, `iter_0000100` and `100` have a number at their end. Other names are ignored, such as
    that of the `.partial` folder of a save that was killed, and so are folders that hold no checkpoint. Rank 0 looks,
    and all ranks return the same path.

    Args:
        folder: folder of the checkpoints. It need not exist.
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.

    Returns:
        Path of the checkpoint, `folder` and its name. None if there is none.

    Raises:
        CheckpointError: on every rank: the folder cannot be read.
    """
    with meet("latest_checkpoint", group) as meeting:
        name = meeting.broadcast(_latest_name(Path(folder)).encode() if meeting.rank == 0 else b"").decode()
    return Path(folder) / name if name else None


def _latest_name(folder: Path) -> str:
    """Name of the last checkpoint of a folder; empty if there is none."""
    if not folder.is_dir():
        return ""
    found = [
        (int(number[0]), one.name)
        for one in folder.iterdir()
        if (number := _NUMBER.search(one.name)) and (one / METADATA_NAME).is_file()
    ]
    return max(found)[1] if found else ""
