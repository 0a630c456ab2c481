"""Attention masks of T5, in the shapes that versions of Transformer Engine expect.

Shapes: B samples, S tokens of the encoder, D tokens of the decoder.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch
from packaging.version import Version

from trackbed.errors import ArgumentError

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
    found = _version_of_engine() if test_te_version is None else Version(test_te_version)
    is_unfused = all(os.environ.get(name) != "1" for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"))
    if found < _FIRST_FUSED and not is_unfused:
        # Megatron Core's text, which its tests compare.
        raise ArgumentError(
            "Flash and fused attention is not supported with transformer engine version < 1.7. "
            "Set NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0or upgrade transformer engine >= 1.7"
        )
    if found < _FIRST_UNIFORM and is_unfused:
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
