"""Tensors of a sample, computed from its tokens: labels, masks, positions and document borders.

Shapes: S tokens of a sample, X 1 if one extra token was read, else 0.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]


def tokens_and_labels(text: Ids, *, extra_token: bool, pad: int) -> tuple[Ids, Ids]:
    """Returns `[S]` input tokens and `[S]` labels, which are the tokens shifted by one.

    Args:
        text: `[S + X]` token ids.
        extra_token: True if X is 1; otherwise the last label is padding.
        pad: the padding id.

    >>> tokens_and_labels(np.array([5, 6, 7]), extra_token=True, pad=-1)
    (array([5, 6]), array([6, 7]))
    >>> tokens_and_labels(np.array([5, 6, 7]), extra_token=False, pad=-1)
    (array([5, 6, 7]), array([ 6,  7, -1]))
    """
    if extra_token:
        return text[:-1], text[1:]
    labels = np.roll(text, -1)
    labels[-1] = pad
    return text, labels


def loss_mask(tokens: Ids, labels: Ids, *, pad: int, masked_input: int | None) -> npt.NDArray[np.float32]:
    """Returns `[S]` 1 where a label counts, 0 where it is padding or its input is `masked_input`.

    >>> loss_mask(np.array([5, 0, 7]), np.array([0, 7, -1]), pad=-1, masked_input=0)
    array([1., 0., 0.], dtype=float32)
    """
    mask = np.ones(len(tokens), dtype=np.float32)
    if masked_input is not None:
        mask[tokens == masked_input] = 0.0
    mask[labels == pad] = 0.0
    return mask


def labels_of_other_documents(piece_lengths: Sequence[int], length: int) -> Ids:
    """Returns the positions whose label is of another document than their input.

    Args:
        piece_lengths: tokens of each document in the sample, the extra token included and padding excluded.
        length: S.

    >>> labels_of_other_documents([2, 0, 3, 1], 5)
    array([1, 4])
    """
    ends = np.unique(np.cumsum(piece_lengths, dtype=np.int64))
    return ends[(ends > 0) & (ends <= length)] - 1


def positions(length: int) -> Ids:
    """Returns `[S]` 0, 1, 2, ..."""
    return np.arange(length, dtype=np.int64)


def positions_in_documents(tokens: Ids, *, eod: int) -> Ids:
    """Returns `[S]` positions that restart at 0 after each end-of-document token.

    >>> positions_in_documents(np.array([5, 6, 0, 7, 8]), eod=0)
    array([0, 1, 2, 0, 1])
    """
    place = positions(len(tokens))
    starts = np.zeros(len(tokens), dtype=np.int64)
    starts[1:] = np.where(tokens[:-1] == eod, place[1:], 0)
    return place - np.maximum.accumulate(starts)


def causal_mask(length: int) -> torch.Tensor:
    """Returns `[1, S, S]` True where attention is masked: at later positions."""
    return torch.ones((length, length), dtype=torch.bool).triu_(1).unsqueeze(0)


@lru_cache(maxsize=2)
def shared_mask(length: int) -> torch.Tensor:
    """Returns `causal_mask`, shared by all datasets: thousands of copies would not fit in memory."""
    return causal_mask(length)


@lru_cache(maxsize=2)
def shared_positions(length: int) -> torch.Tensor:
    """Returns `positions` as a tensor, shared by all datasets."""
    return torch.from_numpy(positions(length))


def cut_at_documents(mask: torch.Tensor, tokens: Ids, *, eod: int) -> torch.Tensor:
    """Returns `mask`, with True also where an end-of-document token lies between the two positions.

    Args:
        mask: `[1, S, S]` bool.
        tokens: `[S]` token ids.
        eod: the end-of-document id.
    """
    document = np.zeros(len(tokens), dtype=np.int32)
    np.cumsum(tokens[:-1] == eod, out=document[1:])
    number = torch.from_numpy(document)
    return mask | (number[:, None] != number[None, :])


def document_borders(piece_lengths: Sequence[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `cu_seqlens` and `max_seqlen` of a sample, for attention over documents of varying length.

    Args:
        piece_lengths: tokens of each document in the sample, the extra token included and padding excluded.
        length: S.

    Returns:
        `[S + 1]` int32: 0, the end of each document, and S for the rest; and the length of the longest one, int32.
        Padding belongs to the last document.

    >>> document_borders([2, 0, 3], 4)[0].tolist(), document_borders([2, 0, 3], 4)[1].item()
    ([0, 2, 4, 4, 4], 2)
    """
    ends = np.unique(np.minimum(np.cumsum(piece_lengths, dtype=np.int64), length))
    ends = np.append(ends[(ends > 0) & (ends < length)], length)
    if sum(piece_lengths) < length and len(ends) > 1:
        ends = np.delete(ends, -2)
    borders = np.full(length + 1, length, dtype=np.int32)
    borders[0] = 0
    borders[1 : len(ends) + 1] = ends
    longest = int(np.diff(borders).max())
    return torch.from_numpy(borders), torch.tensor(longest, dtype=torch.int32)


def borders_of_pieces(
    piece_lengths: Sequence[int], length: int, *, extra_token: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `cu_seqlens` and `max_seqlen` as megatron-core 0.19 has them, with a border for each empty document.

    The extra token is no document of its own, and the padding of a short sample belongs to the document before it. If
    there are more empty documents than places, borders are those of `document_borders`.

    >>> borders_of_pieces([2, 0, 3], 4, extra_token=True)[0].tolist()
    [0, 2, 2, 4, 4]
    >>> borders_of_pieces([3, 1], 6, extra_token=True)[0].tolist()
    [0, 6, 6, 6, 6, 6, 6]
    """
    is_alone = extra_token and piece_lengths[-1] == 1
    ends = np.minimum(np.cumsum(piece_lengths, dtype=np.int64), length)  # of a damaged index, they may lie beyond
    inner = ends[: max(len(piece_lengths) - 1 - is_alone, 0)]
    if len(inner) >= length:
        return document_borders(piece_lengths, length)
    borders = np.full(length + 1, length, dtype=np.int32)
    borders[0] = 0
    borders[1 : len(inner) + 1] = inner
    return torch.from_numpy(borders), torch.tensor(int(np.diff(borders).max()), dtype=torch.int32)


def positions_between(borders: torch.Tensor) -> torch.Tensor:
    """Returns `[S]` positions that restart at each border.

    >>> positions_between(torch.tensor([0, 2, 2, 5, 5, 5], dtype=torch.int32)).tolist()
    [0, 1, 0, 1, 2]
    """
    found = borders.numpy()
    place = positions(len(found) - 1)
    return torch.from_numpy(place - found[np.searchsorted(found, place, side="right") - 1])
