"""Removes tensors from a checkpoint."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from trackbed.checkpoint.commit import commit_checkpoint, link_or_copy
from trackbed.checkpoint.folder import open_folder
from trackbed.checkpoint.format.dcp_metadata import DCP_METADATA, encode_metadata
from trackbed.checkpoint.format.extents import SIDE_NAME, FileChecksum
from trackbed.files.checksum import crc32
from trackbed.files.publish import remove_partial, write_new
from trackbed.files.publish_folder import flush_files, make_partial_folder

_DESCRIPTIONS: Final = (DCP_METADATA, SIDE_NAME)


def remove_tensors(folder: Path, is_removed: Callable[[str], bool]) -> None:
    """Removes tensors from a checkpoint, all or, if it fails, none.

    Files in which nothing is left are removed; in the others the bytes of removed tensors stay.

    Args:
        folder: folder of the checkpoint.
        is_removed: tells from the key of a tensor whether it is removed.

    Raises:
        CheckpointError: the folder is not a checkpoint, or is damaged.
        OSError: a file cannot be written or linked.
    """
    opened = open_folder(folder)
    catalogue = opened.all_items.without(is_removed)
    emptied = set(opened.catalogue.files) - set(catalogue.files)
    contents = {DCP_METADATA: encode_metadata(catalogue)}
    if opened.side is not None:
        files = {name: stored for name, stored in opened.side.files.items() if name not in emptied}
        files[DCP_METADATA] = FileChecksum(len(contents[DCP_METADATA]), crc32(contents[DCP_METADATA]))
        contents[SIDE_NAME] = replace(opened.side, files=files, catalogue=catalogue).encode()
    partial = make_partial_folder(folder.absolute(), may_replace=lambda _: True)
    try:
        # The files that stay are in both folders for a moment, so that the exchange is one step.
        for path in folder.iterdir():
            if path.name in emptied or path.name in _DESCRIPTIONS:
                continue
            if path.is_dir():
                shutil.copytree(path, partial / path.name, copy_function=link_or_copy)
            else:
                link_or_copy(str(path), str(partial / path.name))
        for name, content in contents.items():
            write_new(partial / name, content)
        flush_files(partial / name for name in contents)
        commit_checkpoint(partial, folder)
    except BaseException:
        if partial.exists():
            remove_partial(partial)
        raise
