"""Datasets of T5: sentences in which sentinels replace spans of words, which the decoder predicts.

Attention masks have the shapes that versions of Transformer Engine expect.

Shapes: B samples, S tokens of the encoder, D tokens of the decoder.
"""

import os
import warnings
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from operator import index
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from packaging.version import Version

from trackbed.datasets.masked.config import MaskedWordPieceDatasetConfig
from trackbed.datasets.masked.dataset import MaskedWordPieceDataset
from trackbed.datasets.masked.masking import special_ids
from trackbed.datasets.megatron_dataset import LowLevelDataset
from trackbed.errors import ArgumentError
from trackbed.index.splits import Split
from trackbed.kernels import MaskingTable
from trackbed.kernels.integers import is_integer

_FIRST_FUSED: Final = Version("1.7.0")
"""First version with flash and fused attention over padding."""
_FIRST_UNIFORM: Final = Version("1.10.0")
"""First version whose unfused attention takes the same masks as the others."""

Masks = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


def config_attention_mask(
    encoder_tokens: torch.Tensor,
    decoder_tokens: torch.Tensor,
    encoder_mask: torch.Tensor,
    decoder_mask: torch.Tensor,
    use_local: bool = False,
    test_te_version: str | None = None,
) -> Masks:
    """Returns the attention masks of encoder, decoder and cross-attention, True where attention is masked.

    Args:
        encoder_tokens: `[B, S]` ids; those below 1 are padding.
        decoder_tokens: `[B, D]` ids; those below 1 are padding.
        encoder_mask: `[B, S]` mask of padding.
        decoder_mask: `[B, D]` mask of padding.
        use_local: True for Megatron Core's own transformer layers, False for Transformer Engine's.
        test_te_version: version of Transformer Engine; None for the installed one. Below 1.10 the environment variables
            NVTE_FLASH_ATTN and NVTE_FUSED_ATTN, 1 where such attention is used, decide too.

    Returns:
        With `use_local`, `[B, 1, S, S]`, `[B, 1, D, D]` and `[B, 1, D, S]`. Otherwise the decoder has none, as its
        attention is causal, and the others are `[B, 1, 1, S]` and a pair of `[B, 1, 1, D]` and `[B, 1, 1, S]`; or, for
        unfused attention below 1.10, `[B, 1, S, S]` and `[B, 1, D, S]`.
    """
    if use_local:
        return (
            b1ss_attention_mask(encoder_tokens, encoder_tokens),
            b1ss_attention_mask(decoder_tokens, decoder_tokens, make_history_mask=True),
            b1ss_attention_mask(decoder_tokens, encoder_tokens),
        )
    engine = _version_of_engine() if test_te_version is None else Version(test_te_version)
    is_unfused = all(os.environ.get(name) != "1" for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"))
    if engine < _FIRST_FUSED and not is_unfused:
        # Megatron Core's text, which its tests compare.
        raise ArgumentError(
            "Flash and fused attention is not supported with transformer engine version < 1.7. "
            "Set NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0or upgrade transformer engine >= 1.7"
        )
    if engine < _FIRST_UNIFORM and is_unfused:
        encoder, cross = encoder_tokens, decoder_tokens
        return b1ss_attention_mask(encoder, encoder), None, b1ss_attention_mask(cross, encoder)
    encoder_row, decoder_row = (mask[:, None, None] for mask in (encoder_mask, decoder_mask))
    return encoder_row, None, (decoder_row, encoder_row)


def b1ss_attention_mask(
    source_block: torch.Tensor,
    target_block: torch.Tensor,
    make_history_mask: bool = False,
) -> torch.Tensor:
    """Returns `[B, 1, Q, K]` True where attention is masked: to and from padding and, if causal, to later tokens.

    Args:
        source_block: `[B, Q]` ids of the queries; those below 1 are padding.
        target_block: `[B, K]` ids of the keys.
        make_history_mask: True for causal attention, with Q = K.
    """
    kept = (source_block >= 1)[:, None, :, None] & (target_block >= 1)[:, None, None, :]
    return ~(kept.tril() if make_history_mask else kept)


def _version_of_engine() -> Version:
    for name in ("transformer-engine", "transformer-engine-torch"):
        try:
            return Version(version(name))
        except PackageNotFoundError:
            continue
    raise ArgumentError(
        "test_te_version must be given where Transformer Engine is not installed, found None; or give use_local=True"
    )


_SPECIAL_TOKENS: Final = 2
"""One `bos` and one `eos`."""
_NO_LABEL: Final = -1
_MOST_TOKENS: Final = 1 << 40


@dataclass
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Configuration with the fields, their order and the defaults of megatron-core 0.16.1, then Trackbed's keywords.

    Raises:
        ArgumentError: fields that are missing, contradict each other or are out of range.
    """

    sequence_length_encoder: int | None = field(init=False, default=None)
    """S: `sequence_length`."""

    sequence_length_decoder: int | None = None
    """D, tokens of the decoder; required."""

    def __post_init__(self) -> None:
        """Checks the fields, sets `sequence_length_encoder`, and warns if some sample may not fit."""
        super().__post_init__()
        self.sequence_length_encoder = self.sequence_length
        decoder: Any = self.sequence_length_decoder
        if not is_integer(decoder) or not 1 <= decoder <= _MOST_TOKENS:
            raise ArgumentError(f"sequence_length_decoder must be a whole number of at least 1, found {decoder!r}")
        decoder = self.sequence_length_decoder = index(decoder)  # not NumPy's
        self.check_length(special_tokens=_SPECIAL_TOKENS)
        sentinels = len(sentinels_of(self.tokenizer))
        spans = self.most_spans
        if sentinels < spans:
            warnings.warn(
                f"additional_special_tokens_ids of the tokenizer should have {spans} ids, one for each span that a "
                f"sample of {self.sequence_length} tokens may have, found {sentinels}: a sample with more is an error",
                stacklevel=3,
            )
        if decoder < 1 + 2 * spans:
            warnings.warn(
                f"sequence_length_decoder should be {1 + 2 * spans}, which a sample of {self.sequence_length} tokens "
                f"may need, found {decoder}: a sample that needs more is an error",
                stacklevel=3,
            )

    @property
    def most_spans(self) -> int:
        """Most spans that a sample may have."""
        return int((self.masking_probability or 0) * (self.sequence_length - _SPECIAL_TOKENS))


def sentinels_of(tokenizer: Any) -> list[int]:
    """Returns the ids that replace spans, in order."""
    try:
        ids = [int(token) for token in tokenizer.additional_special_tokens_ids]
    except (AttributeError, NotImplementedError, TypeError):
        ids = []
    if not ids:
        name = type(tokenizer).__name__
        raise ArgumentError(
            f"the tokenizer must have additional_special_tokens_ids for T5, found a {name} without: add <extra_id_0>, "
            "<extra_id_1> and so on to its vocabulary, one for each span of a sample"
        )
    return ids


class T5MaskedWordPieceDataset(MaskedWordPieceDataset):
    """Samples of T5: sentences with a sentinel in place of each masked span, and the spans after their sentinels.

    See `MaskedWordPieceDataset` for arguments and errors.
    """

    config: T5MaskedWordPieceDatasetConfig

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: npt.NDArray[np.integer[Any]] | None,
        num_samples: int | None,
        index_split: Split,
        config: T5MaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self.token_lookup = list(self._pieces.listed)
        self._bos, self._eos = special_ids(config.tokenizer, "bos", "eos")
        self._request_index(config.sequence_length - _SPECIAL_TOKENS, 1)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Returns the names of the configuration fields that belong to the dataset's identity."""
        return [*MaskedWordPieceDataset._key_config_attributes(), "sequence_length_decoder"]

    def _agreed_besides(self) -> dict[str, Any]:
        special = [self._bos, self._eos, *sentinels_of(self.config.tokenizer)]
        return {**super()._agreed_besides(), "special_tokens": special}

    config_attention_mask = staticmethod(config_attention_mask)
    _build_b1ss_attention_mask = staticmethod(b1ss_attention_mask)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Returns one sample.

        Args:
            idx: position, in `[-R, R)`.

        Returns:
            `text_enc` and `enc_mask`, each `[S]` int64; `text_dec`, `labels`, `loss_mask` and `dec_mask`, each `[D]`
            int64; and `truncated`, 1 if the sentences are longer than the sample.

        Raises:
            IndexError: `idx` is out of range.
            ArgumentError: the sample has more spans than there are sentinels, or does not fit the decoder.
            CacheError: the index is damaged.
            FormatError: the files are shorter than their index says, or a token is not in the vocabulary.
        """
        return self._from_kernel(idx) or self._make_sample(idx)

    def _make_sample(self, idx: int) -> dict[str, Any]:
        """Returns the sample at a position, made in Python."""
        sentences, target, random = self._read(idx)
        text = list(chain.from_iterable(sentences))
        tokens, _, _, _, spans = self._create_masked_lm_predictions(text[:target], target, random)
        sentinels = sentinels_of(self.config.tokenizer)
        if len(spans) > len(sentinels):
            raise ArgumentError(
                f"{self._where}: additional_special_tokens_ids of the tokenizer must have {len(spans)} ids for sample "
                f"{idx}, found {len(sentinels)}; {self.config.most_spans} are enough for all"
            )
        encoder: list[int] = []
        predicted: list[int] = []
        done = 0
        for sentinel, (positions, labels) in zip(sentinels, spans, strict=False):
            encoder += [*tokens[done : positions[0]], sentinel]
            predicted += [sentinel, *labels]
            done = positions[-1] + 1
        encoder += tokens[done:]
        return {**self._padded(encoder, predicted, idx), "truncated": int(len(text) > target)}

    def _table(self) -> MaskingTable:
        return MaskingTable(
            is_t5=True,
            decoder_length=self.config.sequence_length_decoder or 0,
            bos=self._bos,
            eos=self._eos,
            listed=np.array(self.token_lookup, dtype=np.int64),
            sentinels=np.array(sentinels_of(self.config.tokenizer), dtype=np.int64),
            **self._common_table(),
        )

    def _lengths(self) -> tuple[tuple[str, int | None], ...]:
        encoder, decoder = self.config.sequence_length, self.config.sequence_length_decoder
        return (
            ("text_enc", encoder),
            ("text_dec", decoder),
            ("labels", decoder),
            ("loss_mask", decoder),
            ("truncated", None),
            ("enc_mask", encoder),
            ("dec_mask", decoder),
        )

    def _padded(self, encoder: list[int], predicted: list[int], idx: int) -> dict[str, Any]:
        """Returns the arrays of a sample.

        Args:
            encoder: tokens of the encoder.
            predicted: tokens that the decoder predicts, without `eos`.
            idx: position of the sample, for errors.
        """
        pad, config = self._pad_token_id, self.config
        length, used = config.sequence_length_decoder or 0, 1 + len(predicted)
        for name, size, most in (
            ("sequence_length", len(encoder), config.sequence_length),
            ("sequence_length_decoder", used, length),
        ):
            if size > most:
                raise ArgumentError(
                    f"{self._where}: {name} must be at least {size} for sample {idx}, found {most}; "
                    f"{1 + 2 * config.most_spans} is enough for all"
                )
        text_enc = np.full(config.sequence_length, pad, dtype=np.int64)
        text_enc[: len(encoder)] = encoder
        text_dec, labels = np.full(length, pad, dtype=np.int64), np.full(length, _NO_LABEL, dtype=np.int64)
        text_dec[:used], labels[:used] = [self._bos, *predicted], [*predicted, self._eos]
        enc_mask, dec_mask = (text_enc != pad).astype(np.int64), (text_dec != pad).astype(np.int64)
        loss_mask = (np.arange(length) < used).astype(np.int64)
        for ids in (text_enc, text_dec, labels):
            ids[ids == pad] = 0  # a valid id for the embedding lookup; the masks are computed already
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": labels,
            "loss_mask": loss_mask,
            "truncated": 0,
            "enc_mask": enc_mask,
            "dec_mask": dec_mask,
        }

    def _get_token_mask(self, numpy_random_state: np.random.RandomState) -> int | None:
        """Returns `mask`. Subclasses may override it."""
        return self._pieces.mask
