"""Removing folders that this process may still be leaving notes in."""

import shutil

from trackbed.cache import await_flush


def remove_folder(folder):
    """Remove a folder, if it is there, once nothing is written to it in the background."""
    await_flush()
    shutil.rmtree(folder, ignore_errors=True)
