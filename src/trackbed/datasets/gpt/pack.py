"""Tensors of a pack, computed from the texts of its pieces.

Shapes: S places of a pack, n pieces.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Texts = Sequence[npt.NDArray[np.int64]]
"""n token ids, each piece with the token behind its last input."""


def padded(places: int, multiple: int) -> int:
    """Returns the next multiple.

    >>> padded(5, 4), padded(8, 4)
    (8, 8)
    """
    return -(-places // multiple) * multiple


def tensors(
    texts: Texts, trained: Sequence[npt.NDArray[np.bool_]], *, length: int, multiple: int
) -> dict[str, npt.NDArray[Any]]:
    """Returns `tokens`, `labels`, `loss_mask`, `position_ids` and `padding_mask` of a pack, `[S]` each.

    Args:
        texts: the pieces.
        trained: True for each label of a piece that has a loss.
        length: S.
        multiple: places to a multiple of which each piece is padded.

    >>> trained = [np.array([False, True]), np.array([True])]
    >>> found = tensors([np.array([5, 6, 7]), np.array([8, 9])], trained, length=8, multiple=4)
    >>> found["tokens"], found["labels"], found["position_ids"]
    (array([5, 6, 0, 0, 8, 0, 0, 0]), array([6, 7, 0, 0, 9, 0, 0, 0]), array([0, 1, 2, 3, 0, 1, 2, 3]))
    >>> found["loss_mask"].tolist(), found["padding_mask"].astype(int).tolist()
    ([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 0, 1, 1, 1])
    """
    tokens, labels, positions = (np.zeros(length, dtype=np.int64) for _ in range(3))
    is_padding, loss_mask = np.ones(length, dtype=np.bool_), np.zeros(length, dtype=np.float32)
    start = 0
    for text, has_loss in zip(texts, trained, strict=True):
        places = len(text) - 1
        own = slice(start, start + places)
        tokens[own], labels[own], is_padding[own], loss_mask[own] = text[:-1], text[1:], False, has_loss
        segment = padded(places, multiple)
        positions[start : start + segment] = np.arange(segment)
        start += segment
    positions[start:] = np.arange(length - start)
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": positions,
        "padding_mask": is_padding,
    }


def borders(texts: Texts, *, length: int, multiple: int) -> dict[str, npt.NDArray[np.int32]]:
    """Returns `cu_seqlens` and `cu_seqlens_padded` of a pack, `[n + 1]`, or `[n + 2]` where places are left.

    The rest of a pack is a segment without a place of its own, so that it lengthens no document.

    >>> borders([np.array([5, 6, 7]), np.array([8, 9])], length=12, multiple=4)["cu_seqlens"].tolist()
    [0, 2, 3, 3]
    >>> borders([np.array([5, 6, 7]), np.array([8, 9])], length=12, multiple=4)["cu_seqlens_padded"].tolist()
    [0, 4, 8, 12]
    """
    places = [len(text) - 1 for text in texts]
    segments = [padded(one, multiple) for one in places]
    rest = length - sum(segments)
    if rest:
        places, segments = [*places, 0], [*segments, rest]
    found = {"cu_seqlens": places, "cu_seqlens_padded": segments}
    return {name: np.cumsum([0, *sizes], dtype=np.int32) for name, sizes in found.items()}


def longest(texts: Texts, *, multiple: int) -> np.int32:
    """Returns the padded length of the longest piece.

    >>> int(longest([np.array([5, 6, 7]), np.array([8, 9])], multiple=4))
    4
    """
    return np.int32(max((padded(len(text) - 1, multiple) for text in texts), default=0))


def counts(trained: Sequence[npt.NDArray[np.bool_]], *, num_borders: int) -> dict[str, npt.NDArray[Any]]:
    """Returns the number of trained labels of a pack, that of its pieces with any, and the first up to each border.

    Args:
        trained: True for each label of a piece that has a loss.
        num_borders: entries of `cu_seqlens`.

    >>> found = counts([np.array([False, True]), np.array([False]), np.array([True])], num_borders=5)
    >>> found["cu_trained_tokens"].tolist(), int(found["num_trained_tokens"]), int(found["num_documents"])
    ([0, 1, 1, 2, 2], 2, 2)
    """
    own = np.array([int(one.sum()) for one in trained], dtype=np.int64)
    sums = np.full(num_borders, own.sum(), dtype=np.int32)
    sums[: len(own) + 1] = np.cumsum([0, *own])
    return {
        "cu_trained_tokens": sums,
        "num_trained_tokens": own.sum(),
        "num_documents": np.int64(np.count_nonzero(own)),
    }
