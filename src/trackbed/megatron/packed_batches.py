"""Packs for Megatron Core's attention over documents of varying length."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import torch

from trackbed.errors import ArgumentError

_NEEDED: Final = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def packed_seq_params(batch: Mapping[str, torch.Tensor]) -> Any:
    """Returns the `PackedSeqParams` of the installed Megatron Core for a batch in the layout "thd".

    Borders are those of the whole batch, also for the part of a rank of a context. From megatron-core 0.19 on,
    `pad_between_seqs` is True, as attention cannot always see by itself where padding lies; where there is a field
    `total_tokens`, it is the number of places of the whole batch. Reads numbers from the device of the batch.

    Args:
        batch: `cu_seqlens` and `cu_seqlens_padded`, int32 `[n + 1]`, and `max_seqlen`, int32 `[1]`.

    Raises:
        ArgumentError: the batch is in another layout.
        ImportError: there is no Megatron Core.
    """
    found = {name: list(batch[name].shape) for name in _NEEDED if name in batch}
    if len(found) < len(_NEEDED) or any(len(shape) != 1 for shape in found.values()):
        raise ArgumentError(
            f"batch must be in the layout 'thd', with {', '.join(_NEEDED)} of one axis, found {found or list(batch)}"
        )
    from megatron.core.packed_seq_params import PackedSeqParams

    logical, padded, longest = batch["cu_seqlens"], batch["cu_seqlens_padded"], int(batch["max_seqlen"])
    values = {
        "qkv_format": "thd",
        "cu_seqlens_q": logical,
        "cu_seqlens_kv": logical,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    later = {"pad_between_seqs": True, "total_tokens": int(padded[-1])}
    known = {field.name for field in fields(PackedSeqParams)}
    return PackedSeqParams(**values, **{name: value for name, value in later.items() if name in known})
