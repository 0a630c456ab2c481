"""Hints for an error about a pair that is missing."""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from trackbed.files.stores import lost_address_hint
from trackbed.tokens.commit import interruption
from trackbed.tokens.paths import get_bin_path, get_idx_path

_MOST_NAMES: Final = 500
"""Pairs of a folder whose names are compared: a blend may miss thousands of pairs."""
_MOST_SHOWN: Final = 3
_LEAST_RATIO: Final = 0.75
_USUAL_END: Final = "_text_document"


def hint_for_missing_pair(path_prefix: str) -> str:
    """Returns the end of an error message about a missing pair: what to do, or which pair may be meant; or nothing."""
    hint = interruption(path_prefix) or lost_address_hint(path_prefix)
    if hint:
        return hint
    similar = _similar_prefixes(path_prefix)
    if not similar:
        return ""
    *first, last = similar
    return f"; did you mean {', '.join(first)}{' or ' if first else ''}{last}?"


def _similar_prefixes(path_prefix: str) -> list[str]:
    """Returns up to three pairs in the same folder with similar names, first those that preprocess makes of it."""
    folder, name = os.path.split(path_prefix)
    if _is_pair(f"{path_prefix}{_USUAL_END}"):
        return [f"{path_prefix}{_USUAL_END}"]
    try:
        found = {entry.removesuffix(".idx") for entry in os.listdir(folder or ".") if entry.endswith(".idx")}  # noqa: PTH208
    except (OSError, ValueError):
        return []
    if len(found) > _MOST_NAMES:
        return []
    made_of_it = sorted(one for one in found if one.startswith(f"{name}_"))
    close = get_close_matches(name, sorted(found - {name, *made_of_it}), n=_MOST_SHOWN, cutoff=_LEAST_RATIO)
    prefixes = (os.path.join(folder, one) for one in (*made_of_it, *close))  # noqa: PTH118  as it was written
    return list(filter(_is_pair, prefixes))[:_MOST_SHOWN]


def _is_pair(path_prefix: str) -> bool:
    return Path(get_idx_path(path_prefix)).is_file() and Path(get_bin_path(path_prefix)).is_file()
