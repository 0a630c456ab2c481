"""Digests of tensors, with which ranks compare their values without sending them.

A digest is a sum of 32-bit words, each times a pseudo-random odd number of its position, modulo 2**64. It is computed
on the tensor's device with integer operations only, so a copy on another device has the same digest. It finds
accidental differences; it does not protect from forgery.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Final

import numpy as np
import torch

_WORD_BYTES: Final = 4
_ROW_WORDS: Final = 1 << 15
_CPU_ROWS: Final = 4
"""Rows of words in one operation on a CPU, whose products fit into its cache."""
_DEVICE_ROWS: Final = 256
_MASK: Final = (1 << 64) - 1


def tensor_digest(tensor: torch.Tensor, poll: Callable[[], None] = lambda: None) -> int:
    """Returns a digest of the values of a tensor in row-major order, in `[0, 2**64)`.

    Equal bits give equal digests, on any device and with any strides. Shape and type are not part of it.

    Args:
        tensor: tensor with values: neither on the device "meta" nor fake.
        poll: called between pieces of the work; an exception that it raises ends it.
    """
    digest = 0
    for component in components(tensor):
        digest = (digest * 0x9E3779B97F4A7C15 + _digest_of_dense(component, poll)) & _MASK
    return digest


def components(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the dense tensors of which a tensor is made: itself, or those of a sparse, quantized or wrapping one."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is torch.sparse_coo:
        coalesced = tensor.coalesce()
        yield from (coalesced.indices(), coalesced.values())
    elif tensor.is_quantized:
        yield tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            yield torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64, device="cpu")
        else:
            yield from (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from components(getattr(tensor, name))
    elif tensor.is_nested:
        for component in tensor.unbind():
            yield from components(component)
    elif tensor.layout is torch.strided:
        yield tensor


@torch.no_grad()
def _digest_of_dense(tensor: torch.Tensor, poll: Callable[[], None]) -> int:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    content = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    num_words = content.numel() // _WORD_BYTES
    tail = bytes(content[num_words * _WORD_BYTES :].tolist())
    multipliers = _multipliers(content.device)
    rows = _CPU_ROWS if content.device.type == "cpu" else _DEVICE_ROWS
    products = torch.empty(min(rows * _ROW_WORDS, num_words), dtype=torch.int64, device=content.device)
    sums = torch.zeros(-(-num_words // _ROW_WORDS), dtype=torch.int64, device=content.device)
    for first in range(0, num_words, rows * _ROW_WORDS):
        poll()
        stop = min(first + rows * _ROW_WORDS, num_words)
        piece = content[first * _WORD_BYTES : stop * _WORD_BYTES]
        if piece.storage_offset() % _WORD_BYTES:
            piece = piece.clone()
        words, row = piece.view(torch.int32), first // _ROW_WORDS
        num_whole = len(words) // _ROW_WORDS
        whole = num_whole * _ROW_WORDS
        if whole:
            shape = (num_whole, _ROW_WORDS)
            torch.mul(words[:whole].view(shape), multipliers, out=products[:whole].view(shape))
            torch.sum(products[:whole].view(shape), dim=1, out=sums[row : row + num_whole])
        if whole < len(words):
            rest = len(words) - whole
            torch.mul(words[whole:], multipliers[:rest], out=products[:rest])
            sums[row + num_whole] = products[:rest].sum()
    of_rows = sums.cpu().numpy().view(np.uint64)
    total = int((of_rows * _random_odd(2, len(of_rows))).sum(dtype=np.uint64))
    return (total + (int.from_bytes(tail, "little") + 1) * (2 * content.numel() + 1)) & _MASK


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_random_odd(1, _ROW_WORDS).view(np.int64)).to(device)


def _random_odd(seed: int, count: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    return np.random.PCG64(seed).random_raw(count) | np.uint64(1)
