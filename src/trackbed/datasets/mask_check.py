"""Check that masks of trained tokens are read: all orders but "packed" train on every token."""

import logging
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Final

from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.end_check import local_pairs
from trackbed.files.stores import is_address
from trackbed.tokens.paths import get_beside_path
from trackbed.tokens.trained_tokens import TRAINED

logger = logging.getLogger(__name__)

_FOLDERS: Final = 64
_TOLD: Final[set[str]] = set()
"""Pairs that this process has warned about: a blend file is looked at before its datasets are built."""


def check_masks(config: BlendedMegatronDatasetConfig) -> None:
    """Logs a warning if a mask lies beside a pair, and the order of a GPT dataset does not read it."""
    order = getattr(config, "order", None)
    if order is not None:
        tell_of_masks(local_pairs(config), order)


def tell_of_masks(pairs: Iterable[str], order: str, *, where: object = None) -> None:
    """Logs a warning, once for some pairs, if an order does not read the masks of some.

    Lists the folders of the pairs, of which there are few, and at most 64: a look at each of thousands of pairs takes
    some file systems seconds.

    Args:
        pairs: paths of pairs; addresses are left out.
        order: order of their samples.
        where: the file that names them, if there is one.
    """
    if order == "packed":
        return
    folders: dict[str, list[str]] = {}
    for pair in pairs:
        if not is_address(pair):
            folder, slash, _ = pair.rpartition("/")
            folders.setdefault(folder + slash, []).append(pair)
    masked = [pair for folder, some in islice(folders.items(), _FOLDERS) for pair in _masked(folder, some)]
    if _TOLD.issuperset(masked):
        return
    _TOLD.update(masked)
    logger.warning(
        "%s%s beside %s: order %r does not read masks, so all tokens are trained; order = 'packed' does",
        "" if where is None else f"{where}: ",
        "a mask lies" if len(masked) == 1 else f"masks of {len(masked)} pairs lie",
        masked[0] if len(masked) == 1 else f"{masked[0]} and others",
        order,
    )


def _masked(folder: str, pairs: Iterable[str]) -> list[str]:
    """Returns the pairs of a folder that have a mask."""
    try:
        masks = {folder + path.name for path in Path(folder).iterdir() if path.suffix == f".{TRAINED}"}
    except (OSError, ValueError):  # opening the pairs says why
        return []
    return [pair for pair in pairs if get_beside_path(pair, TRAINED) in masks]
