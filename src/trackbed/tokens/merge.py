"""Merging of several pairs into one."""

from collections.abc import Callable, Sequence

from trackbed.errors import ArgumentError
from trackbed.files.stores import is_address
from trackbed.tokens.content import PairContent
from trackbed.tokens.paths import get_bin_path, get_idx_path
from trackbed.tokens.writer import IndexedDatasetBuilder


def merge(
    path_prefixes: Sequence[str],
    output_prefix: str,
    *,
    multimodal: bool = False,
    progress: Callable[[int], None] | None = None,
    idx_cache: str | None = None,
) -> None:
    """Writes the documents of all pairs, in the order given, as the pair `output_prefix`.

    Args:
        path_prefixes: paths or addresses of at least one pair, all of one dtype.
        output_prefix: prefix of the result, which appears complete and replaces an older pair of that name.
        multimodal: True if the sequences have modes.
        progress: called with the number of bytes of each pair after it was copied.
        idx_cache: folder of copies of `.idx` objects, for pairs at addresses; None for `default_idx_cache()`.

    Raises:
        ArgumentError: `path_prefixes` is empty, or the pairs have different dtypes.
        FormatError: a pair is damaged.
    """
    if not path_prefixes:
        raise ArgumentError("path_prefixes must name at least one pair, found none")
    if is_address(output_prefix):
        raise ArgumentError(f"{output_prefix}: the output must be a path on a disk, found an address")
    dtype = PairContent.open(path_prefixes[0], idx_cache=idx_cache).index.dtype
    builder = IndexedDatasetBuilder(get_bin_path(output_prefix), dtype, multimodal)
    try:
        for prefix in path_prefixes:
            size_bytes = builder.add_index(prefix, idx_cache=idx_cache)
            if progress is not None:
                progress(size_bytes)
        builder.finalize(get_idx_path(output_prefix))
    except BaseException:
        builder.discard()
        raise
