"""Identity of a pair's files: their sizes, and a digest of both ends of the index."""

import os
from pathlib import Path
from typing import Any

from trackbed.tokens.format import SequenceIndex, open_index
from trackbed.tokens.paths import get_bin_path, get_idx_path


def identity(path_prefix: str) -> dict[str, Any]:
    """Sizes of both files, and the SHA-256 of the index's header and of its first and last 4 KiB.

    Contains no times, so a copied corpus has the same identity. The cost does not depend on the size of the files.

    Raises:
        FormatError: the index is damaged.
        OSError: one of the files cannot be read.
    """
    bin_bytes = os.stat(get_bin_path(path_prefix)).st_size  # noqa: PTH116  thousands of pairs are opened
    return identity_of(open_index(Path(get_idx_path(path_prefix))), bin_bytes=bin_bytes)


def identity_of(index: SequenceIndex, *, bin_bytes: int) -> dict[str, Any]:
    """Identity of a pair whose index is already open."""
    return {"bin_bytes": bin_bytes, "idx_bytes": index.ends.size_bytes, "idx_ends_sha256": index.ends.sha256}
