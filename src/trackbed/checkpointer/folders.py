"""Removes the folders of checkpoints, and sets them aside, so that at any moment each is whole or none."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from trackbed.files.publish import flush_to_disk, new_partial, publish, remove_partial


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint. Killed in between, it leaves a partial folder, which the next writer removes.

    Raises:
        OSError: it cannot be removed.
    """
    partial = new_partial(folder.with_name(f"partial.{folder.name}"))
    publish(folder, partial)
    flush_to_disk(folder.parent)
    remove_partial(partial)


@contextlib.contextmanager
def set_aside(folders: Sequence[Path]) -> Iterator[list[Path]]:
    """Gives checkpoints other names, and the old ones again if the block fails. Yields the other names.

    Raises:
        OSError: one cannot be renamed.
    """
    moved: list[Path] = []
    try:
        for folder in folders:
            names = (folder.with_name(f"{folder.name}.superseded-{number}") for number in itertools.count(1))
            free = next(name for name in names if not name.exists())
            publish(folder, free)
            moved.append(free)
        if moved:
            flush_to_disk(moved[0].parent)
        yield moved
    except BaseException:
        for folder, name in zip(folders, moved, strict=False):
            publish(name, folder)
        raise
