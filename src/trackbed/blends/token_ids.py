"""Check that the tokens of a blend are ids of its tokenizer, by the first ones of each `[[dataset]]`."""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from trackbed.blends.members import Member
from trackbed.blends.toml_tables import Problems
from trackbed.files.stores import is_address
from trackbed.kernels.integers import is_integer
from trackbed.tokens import IndexedDataset

__all__ = ["check_token_ids"]

_MOST_ENTRIES: Final = 32
_TOKENS: Final = 4096
"""Tokens that are read of each."""


def check_token_ids(members: Iterable[Member], tokenizer: Any, problems: Problems) -> None:
    """Adds a problem for each `[[dataset]]` with tokens beyond the tokenizer's ids: those of another tokenizer.

    Reads the first tokens of one pair of each, on local disks.

    Args:
        members: the datasets.
        tokenizer: its `vocab_size` and `eod` limit the ids; without `vocab_size` nothing is checked.
        problems: collection that is added to.
    """
    num_ids = getattr(tokenizer, "vocab_size", None)
    if not is_integer(num_ids):
        return
    eod = getattr(tokenizer, "eod", None)
    num_ids = max(int(num_ids or 0), int(eod) + 1 if is_integer(eod) else 0)  # type: ignore[arg-type]  # an integer
    first_of_each = {member.entry.where: member for member in reversed(list(members))}
    for where, member in sorted(first_of_each.items())[:_MOST_ENTRIES]:
        if is_address(member.pairs[0]):
            continue
        found = _first_tokens(member.pairs[0])
        if found.size and (largest := found.max()) >= num_ids:
            problems.add(
                (*where, "path"),
                f"must have tokens of the blend's tokenizer, which are below {num_ids:,}, found {largest:,} in "
                f"{member.pairs[0]}.bin: another tokenizer made them",
            )


def _first_tokens(prefix: str) -> "np.ndarray[Any, Any]":
    dtype = IndexedDataset(prefix, open_when_read=True).index.dtype
    return np.fromfile(f"{prefix}.bin", dtype, _TOKENS)
