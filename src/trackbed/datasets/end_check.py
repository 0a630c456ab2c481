"""Check that documents end with the token that options of a GPT dataset look for.

Positions, masks and losses that depend on the ends of documents are unaffected, without an error, by data in which no
document ends with the end-of-document token: data of another tokenizer, or made without `--append-eod`.

Shapes: D documents looked at, N sequences looked at.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.errors import TrackbedError
from trackbed.files import open_regular
from trackbed.files.stores import is_address
from trackbed.kernels.integers import is_integer
from trackbed.plural import number_of
from trackbed.tokens import get_bin_path, get_idx_path
from trackbed.tokens.idx_header import HEADER_BYTES, decode_header

logger = logging.getLogger(__name__)

_OPTIONS: Final = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
_PAIRS: Final = 8
_DOCUMENTS: Final = 8
_SEQUENCES: Final = 1024  # a document may be many sentences


def check_document_ends(config: BlendedMegatronDatasetConfig) -> None:
    """Logs a warning if an option needs the ends of documents, and none of the first ones ends with the token.

    Looks at the first documents of at most eight local pairs, with a few reads of each; maps no file. Pairs that cannot
    be read so are left out: opening them says why.
    """
    options = [name for name in _OPTIONS if getattr(config, name, None)]
    eod = _end_of_document(config.tokenizer) if options else None
    if eod is None:
        return
    last_tokens: Counter[int] = Counter()
    pairs: list[str] = []
    for prefix in islice(local_pairs(config), _PAIRS):
        tokens = _last_tokens_or_none(prefix)
        if eod in tokens:
            return
        if tokens:
            last_tokens.update(tokens)
            pairs.append(prefix)
    if pairs:
        ((common, _),) = last_tokens.most_common(1)
        logger.warning(
            "%s: %s must find the end-of-document token %d of the tokenizer, but none of the first %s of %s ends with"
            " it (most end with %d): use the tokenizer and the eod_token that made the data, or make the data with"
            " --append-eod",
            pairs[0],
            " and ".join(options),
            eod,
            number_of(last_tokens.total(), "document"),
            number_of(len(pairs), "pair"),
            common,
        )


def last_tokens(path_prefix: str) -> list[int]:
    """Returns the `[D]` last tokens of the first documents of a local pair; empty documents are left out."""
    index, size = open_regular(get_idx_path(path_prefix))
    try:
        header = decode_header(os.pread(index, HEADER_BYTES, 0), path=path_prefix)
        if size != header.size_bytes:  # with modes, the last sequence of a document may be an image
            return []
        borders = _numbers(index, "<i8", header.borders_at, min(header.document_count, _DOCUMENTS + 1))
        count = min(header.sequence_count, _SEQUENCES)
        lengths = _numbers(index, "<i4", HEADER_BYTES, count)
        pointers = _numbers(index, "<i8", header.pointers_at, count)
    finally:
        os.close(index)
    dtype = np.dtype(header.dtype)
    tokens, _ = open_regular(get_bin_path(path_prefix))
    try:
        last = [stop - 1 for start, stop in pairwise(borders.tolist()) if 0 <= start < stop <= count]
        ends = [int(pointers[one]) + (int(lengths[one]) - 1) * dtype.itemsize for one in last if lengths[one] > 0]
        read = [os.pread(tokens, dtype.itemsize, end) for end in ends if end >= 0]
    finally:
        os.close(tokens)
    return [int(np.frombuffer(raw, dtype=dtype)[0]) for raw in read if len(raw) == dtype.itemsize]


def _numbers(descriptor: int, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
    raw = os.pread(descriptor, count * np.dtype(dtype).itemsize, offset)
    return np.frombuffer(raw, dtype=dtype)


def _last_tokens_or_none(prefix: str) -> list[int]:
    try:
        return last_tokens(prefix)
    except (TrackbedError, OSError, ValueError, IndexError, OverflowError) as error:
        logger.debug("%s: the ends of documents were not looked at: %s", prefix, error)
        return []


def local_pairs(config: BlendedMegatronDatasetConfig) -> Iterator[str]:
    """Yields the prefix of each pair of the blends that is not in an object store, once."""
    blends = [config.blend, *(config.blend_per_split or [])]
    groups = config.groups or {}
    seen: set[str] = set()
    for blend in blends:
        for prefix in [] if blend is None else blend[0]:
            for pair in groups.get(prefix, [prefix]):
                if pair not in seen and not is_address(pair):
                    seen.add(pair)
                    yield pair


def _end_of_document(tokenizer: Any) -> int | None:
    """Returns the id that ends a document; None if the tokenizer has none."""
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError, TrackbedError):
        return None
    return int(eod) if is_integer(eod) else None
