"""What a start found, remembered for the next one with the same configuration.

The next one asks the system whether any file has changed since, and where none has, it opens no pair, reads no manifest
and describes no dataset: all of that waits until somebody reads a sample.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from trackbed import __version__
from trackbed.cache import (
    Memo,
    Pending,
    Recall,
    entry_digest,
    find_together,
    flushed_note,
    read_memo,
    read_notes,
    recalling,
    record_of,
    touch_use,
    use_name,
    write_memo,
)
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.gpt import GPTDataset
from trackbed.datasets.megatron import MegatronDataset
from trackbed.errors import CacheError, TrackbedError
from trackbed.files import boot_id
from trackbed.tokens import get_bin_path, get_idx_path
from trackbed.tokens.opening import Opening, openings

__all__ = ["Start"]

logger = logging.getLogger(__name__)

_OF_NO_MATTER: Final = ("path_to_cache", "num_dataset_builder_threads")


class Start:
    """A start, and what an earlier one with the same configuration remembered.

    Args:
        cls: class of the datasets that are blended.
        sizes: samples to give at least per split.
        config: what decides the samples.
    """

    def __init__(
        self, cls: type[MegatronDataset], sizes: Sequence[int | None], config: BlendedMegatronDatasetConfig
    ) -> None:
        self.key = _key(cls, sizes, config)
        """What tells it from others, on every rank alike; None where nothing is remembered of such starts."""
        self._folder = f"{Path(config.path_to_cache or '')}"
        self._own = f"{self._folder}/.trackbed"
        self._path = f"{self._own}/starts/{_digest(f'{self.key}{_folder_of(config)}')}.json"

    @cached_property
    def memo(self) -> Memo | None:
        """What the last such start remembered; None where it did not, or its note of what it used is gone."""
        memo = None if self.key is None else read_memo(self._path, self._folder)
        if memo is None or not self._is_on_disk(memo.content):
            return None
        return memo if touch_use(self._own, memo.content["use"]) else None

    def _is_on_disk(self, content: Mapping[str, Any]) -> bool:
        """True if no loss of power can have damaged the entries since, or notes say that it has damaged none."""
        if content["boot"] and content["boot"] == boot_id():
            return True
        return {flushed_note(digest) for digest in content["digests"]} <= read_notes(self._own)

    def recalled(self, build: Callable[[], list[Any]]) -> list[Any]:
        """What `build` makes from what is remembered. The caller vouches that no file has changed.

        Raises:
            CacheError: what is remembered is not what `build` asks for.
        """
        content: Any = self.memo.content if self.memo is not None else {}
        recall = Recall(self._folder, content["entries"], content["digests"])
        with openings(content["pairs"]), recalling(recall):
            built = build()
        if not recall.is_used_up:
            msg = f"{self._path}: must name the entries of this start, found others; remove it and start again"
            raise CacheError(msg)
        return built

    def remember(self, pending: Sequence[Pending], pairs: Mapping[str, Opening]) -> None:
        """Write down what was found, where all was and the cache can be written.

        Raises nothing for what is wrong with a file: one rank remembers for all, after they have parted.

        Args:
            pending: the entries, in the order in which they were asked for. Those that other ranks built are opened.
            pairs: what was found out of each pair, by prefix.
        """
        if self.key is None:
            return
        try:
            self._remember(pending, pairs)
        except (OSError, TrackbedError) as error:  # for instance a cache that can only be read
            logger.debug("%s: nothing is remembered of this start: %s", self._path, error)

    def _remember(self, pending: Sequence[Pending], pairs: Mapping[str, Opening]) -> None:
        if not all(find_together(pending)):
            return
        seen = [sighting for sighting in (one.see() for one in pending) if sighting is not None]
        if len(seen) < len(pending):
            return
        of_pairs = [stamp for opening in pairs.values() for stamp in (opening.ends.stamp, opening.bin_stamp)]
        stamps = np.concatenate([np.array(of_pairs, dtype=np.int64).reshape(-1, 3), *(one.stamps for one in seen)])
        files = chain(
            (path(os.path.abspath(prefix)) for prefix in pairs for path in (get_idx_path, get_bin_path)),  # noqa: PTH100
            chain.from_iterable(sighting.paths for sighting in seen),
        )
        content = {
            "use": use_name([one.entry for one in pending]),
            "boot": boot_id(),
            "digests": [entry_digest(one.stamps) for one in seen],
            "pairs": {prefix: opening.to_json() for prefix, opening in pairs.items()},
            "entries": [record_of(sighting, self._folder) for sighting in seen],
        }
        write_memo(self._path, self._folder, files, stamps, content)


def _key(cls: type[MegatronDataset], sizes: Sequence[int | None], config: BlendedMegatronDatasetConfig) -> str | None:
    """32 digits, wherever the cache and the rank are; None but for `GPTDataset` itself with a cache.

    What another class asks for is its own affair.
    """
    if cls is not GPTDataset or config.order == "instant" or config.mock:
        return None
    if config.path_to_cache is None or config.defer_npy_index_mmap:
        return None
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _OF_NO_MATTER}
    try:
        text = json.dumps([__version__, list(sizes), options], sort_keys=True, default=_plain)
    except (TypeError, ValueError):
        return None
    return _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _folder_of(config: BlendedMegatronDatasetConfig) -> str:
    """What relative prefixes begin from; nothing where there are none."""
    blends = [config.blend, *(config.blend_per_split or [])]
    prefixes = chain.from_iterable(blend[0] for blend in blends if blend)
    pairs = chain.from_iterable((getattr(config, "groups", None) or {}).values())
    return "" if all(map(os.path.isabs, chain(prefixes, pairs))) else os.getcwd()  # noqa: PTH109


def _plain(value: Any) -> Any:
    """What JSON does not know, in values that it does."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    identifiers = getattr(value, "unique_identifiers", None)
    if identifiers is None:
        raise TypeError(type(value).__name__)
    return identifiers
