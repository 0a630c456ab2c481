"""Configuration of GPT datasets."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from trackbed.datasets.config import BlendedMegatronDatasetConfig, storage_of
from trackbed.errors import ArgumentError
from trackbed.kernels.integers import check_at_least
from trackbed.kernels.packing import PackShape

_PACKED_ONLY: Final = {
    "pack_multiple": 1,
    "pack_most_documents": None,
    "pack_window": None,
    "pack_long": "split",
    "pack_contiguous": None,
}
_OF_STRETCHES: Final = (
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    *("create_cu_seqlens", "inter_document_masking", "mask_borders"),
)
"""Options of samples that are stretches of text."""


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Configuration with the fields, their order and the defaults of megatron-core 0.19, then Trackbed's keywords.

    Raises:
        ArgumentError: fields that are missing, contradict each other or are out of range.
    """

    reset_position_ids: bool | None = None
    """True to restart positions after each end-of-document token; required."""

    reset_attention_mask: bool | None = None
    """True if the attention mask also hides earlier documents, without an effect if `create_attention_mask` is False;
    required."""

    eod_mask_loss: bool | None = None
    """True to exclude predictions from an end-of-document token from the loss; required."""

    create_attention_mask: bool = True
    """True to include `attention_mask` in samples, bool `[1, S, S]`, True where attention is masked: torch's
    `scaled_dot_product_attention` takes `~attention_mask`."""

    drop_last_partial_validation_sequence: bool = True
    """True to drop a partial last sample of the validation split."""

    add_extra_token_to_sequence: bool = True
    """True to read one token beyond the length of a sample, so that its last label is known."""

    object_storage_cache_path: str | None = None
    """Folder on this host for copies of the `.idx` objects of pairs in object stores; needed for prefixes that are
    addresses, with `mmap_bin_files=False`. Its processes share it, and hosts need not."""

    data_parallel_size: int = 1
    """Not used; kept for code that reads it."""

    sequence_parallel_size: int = 0
    """Not used; kept for code that reads it."""

    hybrid_context_parallel: bool = False
    """Must be False: samples are not cut for hybrid context parallelism."""

    sequences_per_dataset: Mapping[str, tuple[int, int]] | None = None
    """Sequences and document borders that the files of each prefix must have."""

    token_dtype_code: int | None = field(init=False, default=None)
    """Code of the narrowest token type for the tokenizer's vocabulary: 8 is uint16, 4 is int32."""

    context_parallel_size: int | None = None
    """Not used; kept for code that reads it."""

    inter_document_masking: bool = False
    """True for samples whose documents are kept apart, as megatron-core 0.19 has them: `cu_seqlens` and `max_seqlen` as
    with `create_cu_seqlens`, but with a border for each empty document; positions that restart at each border; no
    attention mask. The borders are those of the files: the token that ends a document does not count."""

    s3_cache_path: str | None = field(default=None, kw_only=True)
    """The older name of `object_storage_cache_path`."""

    create_cu_seqlens: bool = field(default=False, kw_only=True)
    """True to include `cu_seqlens`, int32 `[S + 1]`: 0, the end of each document, and S for the rest; and `max_seqlen`,
    the length of the longest one. They are computed from the sequence borders of the files, which are document borders
    if each document is one sequence."""

    mask_borders: bool = field(default=False, kw_only=True)
    """True to exclude labels of another document from the loss: the first token of a document is not to be predicted
    from the one before. The borders are those of `create_cu_seqlens`, and do not depend on the values of tokens."""

    pack_multiple: int = field(default=1, kw_only=True)
    """With `order="packed"`, places to a multiple of which each document is padded, at least 1: lcm(2 cp, cp tp) where
    context or sequence parallelism asks for it. It must divide `sequence_length`."""

    pack_most_documents: int | None = field(default=None, kw_only=True)
    """With `order="packed"`, most documents in a pack, at least 1; None for any number."""

    pack_window: int | None = field(default=None, kw_only=True)
    """With `order="packed"`, consecutive documents that are packed with each other only, at least 1, so that a pack is
    read from one part of the file; None for all."""

    pack_long: Literal["split", "cut", "drop"] = field(default="split", kw_only=True)
    """With `order="packed"`, what becomes of a document of more than `sequence_length` + 1 tokens: packs of its own and
    the rest ("split"), its beginning ("cut"), or nothing ("drop")."""

    pack_contiguous: Sequence[str] | None = field(default=None, kw_only=True)
    """With `order="packed"`, prefixes of the datasets whose samples are consecutive documents, in the order of the
    file, and cut where a sample is full; None for none. Documents are kept apart in these, too."""

    def __post_init__(self) -> None:
        """Checks the fields, and sets `token_dtype_code`."""
        super().__post_init__()
        for name in ("tokenizer", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) is None:
                raise ArgumentError(f"{name} must be given, found None")
        storage_of(self)
        if self.hybrid_context_parallel:
            raise ArgumentError("hybrid_context_parallel must be False, found True")
        self._check_packs()
        if self.groups is not None and self.sequences_per_dataset is not None:
            raise ArgumentError("sequences_per_dataset must be None with groups, found both")
        if not hasattr(self.tokenizer, "unique_identifiers"):
            found = type(self.tokenizer).__name__
            raise ArgumentError(
                f"tokenizer must be an object with eod, pad, vocab_size and unique_identifiers, found a {found}"
            )
        with contextlib.suppress(NotImplementedError):
            _ = getattr(self.tokenizer, "eod", None)  # a tokenizer that resolves it lazily raises here if it has none
        vocab_size: Any = getattr(self.tokenizer, "vocab_size", None)
        if vocab_size is not None:
            self.token_dtype_code = 4 if vocab_size > np.iinfo(np.uint16).max + 1 else 8
        elif self.sequences_per_dataset is not None:
            raise ArgumentError("sequences_per_dataset needs a tokenizer with a vocab_size, found None")

    def _check_packs(self) -> None:
        """Checks the options of packs, and those that packs do without."""
        if self.order != "packed":
            for name, default in _PACKED_ONLY.items():
                if getattr(self, name) != default:
                    raise ArgumentError(f"{name} needs order='packed', found {self.order!r}")
            return
        check_at_least(1, pack_multiple=self.pack_multiple)
        if self.sequence_length % self.pack_multiple:
            raise ArgumentError(
                f"pack_multiple must divide the sequence_length {self.sequence_length}, found {self.pack_multiple}"
            )
        self.pack_shape  # noqa: B018  raises for options that are out of range
        for name in ("pack_most_documents", "pack_window"):
            check_at_least(1, **{name: 1 if getattr(self, name) is None else getattr(self, name)})
        if self.pack_contiguous is not None and isinstance(self.pack_contiguous, str):
            raise ArgumentError(f"pack_contiguous must be prefixes in a list, found the text {self.pack_contiguous!r}")
        for name in _OF_STRETCHES:
            if getattr(self, name):
                raise ArgumentError(f"{name} must be False with order='packed', where documents are always kept apart")
        if not self.add_extra_token_to_sequence:
            raise ArgumentError("add_extra_token_to_sequence must be True with order='packed', found False")

    @property
    def pack_shape(self) -> PackShape:
        """Length of a pack, and what becomes of longer documents."""
        return PackShape(self.sequence_length, self.pack_multiple, self.pack_long)
