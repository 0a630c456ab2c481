"""The tree of two-way interleavings that blends the datasets of one stage.

Shapes: K datasets, M nodes of the tree.
"""

import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from trackbed.kernels.instant import NODE, draw_phases

Weight = int | float | Fraction
"""A number of at least 0 that has an exact ratio of integers."""


def integer_weights(weights: Sequence[Weight]) -> list[int]:
    """`[K]` finite weights scaled by their common denominator to integers of exactly the same proportions.

    >>> integer_weights([0.5, 0.25, 3])
    [2, 1, 12]
    """
    ratios = [weight.as_integer_ratio() for weight in weights]
    common = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def interleaving(
    weights: Sequence[int], *, drawn: npt.NDArray[np.int64], phase_key: int
) -> tuple[npt.NDArray[np.void], int]:
    """Builds the Huffman tree over the datasets whose weight is above 0.

    The two lightest nodes without a parent become the children of a new node, the lighter one on the left. On ties
    leaves precede inner nodes, and lower numbers precede higher ones.

    Args:
        weights: `[K]` each at least 0, at least one above 0.
        drawn: `[K]` number of draws from each dataset before the stage.
        phase_key: seed of the stream of the nodes' phases, in `[0, 2**64)`.

    Returns:
        `[M]` of `NODE`, first the leaves of all K datasets and then the inner nodes; and the number of the root.

    >>> nodes, root = interleaving([2, 1, 0, 1], drawn=np.zeros(4, dtype=np.int64), phase_key=7)
    >>> nodes["left"].tolist(), nodes["right"].tolist(), root
    ([0, 0, 0, 0, 1, 0], [0, 1, 2, 3, 3, 4], 5)
    """
    num_datasets = len(weights)
    lefts, rights, shares = _merge_lightest(weights)
    nodes = np.zeros(num_datasets + len(shares), dtype=NODE)
    leaves, inner = nodes[:num_datasets], nodes[num_datasets:]
    leaves["phase"] = drawn
    leaves["right"] = np.arange(num_datasets)
    inner["share"] = np.array(shares, dtype=np.uint64)
    inner["left"] = np.array(lefts, dtype=np.uint32)
    inner["right"] = np.array(rights, dtype=np.uint32)
    draw_phases(nodes, num_datasets, phase_key)
    only = next(dataset for dataset in range(num_datasets) if weights[dataset] > 0)
    return nodes, len(nodes) - 1 if shares else only


def _merge_lightest(weights: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Left child, right child and left child's share of 2**64 of each inner node, in order of creation.

    A new node is never lighter than an earlier one, so two sorted queues replace a heap.
    """
    leaves = deque(sorted((weight, dataset) for dataset, weight in enumerate(weights) if weight > 0))
    made: deque[tuple[int, int]] = deque()
    lefts: list[int] = []
    rights: list[int] = []
    shares: list[int] = []

    def lightest() -> tuple[int, int]:
        return leaves.popleft() if leaves and (not made or leaves[0][0] <= made[0][0]) else made.popleft()

    for number in range(len(weights), len(weights) + len(leaves) - 1):
        light, left = lightest()
        heavy, right = lightest()
        both = light + heavy
        made.append((both, number))
        lefts.append(left)
        rights.append(right)
        # Rounded to nearest, and at least 1: a share of 0 marks a leaf.
        shares.append(max(1, ((light << 65) + both) // (2 * both)))
    return lefts, rights, shares
