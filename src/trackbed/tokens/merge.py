"""Merging of several pairs into one."""

from collections.abc import Callable, Sequence
from pathlib import Path

from trackbed.errors import ArgumentError
from trackbed.tokens.format import open_index
from trackbed.tokens.paths import get_bin_path, get_idx_path
from trackbed.tokens.writer import IndexedDatasetBuilder

__all__ = ["merge"]


def merge(
    path_prefixes: Sequence[str],
    output_prefix: str,
    *,
    multimodal: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the documents of all pairs, in the order given, as the pair `output_prefix`.

    Args:
        path_prefixes: at least one pair, all of one dtype.
        output_prefix: prefix of the result, which appears complete and replaces an older pair of that name.
        multimodal: True if the sequences have modes.
        progress: called with the number of bytes of each pair after it was copied.

    Raises:
        ArgumentError: `path_prefixes` is empty, or the pairs have different dtypes.
        FormatError: a pair is damaged.
    """
    if not path_prefixes:
        msg = "path_prefixes must name at least one pair, found none"
        raise ArgumentError(msg)
    dtype = open_index(Path(get_idx_path(path_prefixes[0]))).dtype
    builder = IndexedDatasetBuilder(get_bin_path(output_prefix), dtype, multimodal)
    try:
        for prefix in path_prefixes:
            builder.add_index(prefix)
            if progress is not None:
                progress(Path(get_bin_path(prefix)).stat().st_size)
        builder.finalize(get_idx_path(output_prefix))
    except BaseException:
        builder.discard()
        raise
