"""Typed wrappers of the kernels of the instant order.

Shapes: K datasets, T stages, M nodes of all stages' trees, N positions.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.outputs import check_output
from trackbed.kernels.permutation import check_blocks

NODE: Final = np.dtype([("share", "<u8"), ("phase", "<u8"), ("left", "<u4"), ("right", "<u4")])
"""Node of a tree of two-way interleavings, as defined in `native/include/trackbed/interleaving.hpp`."""

_LAST_POSITION: Final = np.iinfo(np.int64).max
_MOST_DATASETS: Final = 2**30
_NO_PARENT: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, eq=False)
class BlendTrees:
    """The trees of all stages of a blend, checked once. The arrays become read-only.

    The check ensures that every walk through a tree ends, and stays inside the arrays.

    Raises:
        ArgumentError: an array has another type or length, or the nodes are not such trees.
    """

    num_datasets: int
    """K, in `[1, 2**30]`."""
    nodes: npt.NDArray[np.void]
    """`[M]` of `NODE`: one block per stage, with K leaves and then the inner nodes, each after its children."""
    first_samples: npt.NDArray[np.int64]
    """`[T]` first position of each stage: 0, then never decreasing."""
    first_nodes: npt.NDArray[np.int64]
    """`[T]` index in `nodes` at which each stage's block begins."""
    roots: npt.NDArray[np.uint32]
    """`[T]` root of each stage's tree, as an index in its block."""
    ramps: npt.NDArray[np.int64]
    """`[T]` samples of a ramp that goes from the tree of the stage before to its own; the stage before begins at the
    same sample, and is no ramp. 0 for stages of constant weights."""
    parents: npt.NDArray[np.uint32] = field(init=False, repr=False)
    """`[M]` parent of each node in its block, 2**32 - 1 for none; `[0]` without ramps."""

    def __post_init__(self) -> None:
        _check_types(self)
        for stage in range(len(self.roots)):
            _check_block(self.num_datasets, self.block(stage), int(self.roots[stage]), stage)
        object.__setattr__(self, "parents", self._parents() if self.ramps.any() else np.zeros(0, dtype=np.uint32))
        for array in (self.nodes, self.first_samples, self.first_nodes, self.roots, self.ramps):
            array.flags.writeable = False

    def _parents(self) -> npt.NDArray[np.uint32]:
        found = []
        for stage in range(len(self.roots)):
            block = self.block(stage)
            parents = np.full(len(block), _NO_PARENT, dtype=np.uint32)
            inner = np.arange(self.num_datasets, len(block), dtype=np.uint32)
            parents[block["left"][self.num_datasets :]] = inner
            parents[block["right"][self.num_datasets :]] = inner
            found.append(parents)
        return np.concatenate(found)

    def block(self, stage: int) -> npt.NDArray[np.void]:
        """The nodes of one stage."""
        start = int(self.first_nodes[stage])
        stop = int(self.first_nodes[stage + 1]) if stage + 1 < len(self.first_nodes) else len(self.nodes)
        return self.nodes[start:stop]


@dataclass(frozen=True, slots=True, eq=False)
class EpochShuffles:
    """Shuffles of the epochs of every dataset.

    Raises:
        ArgumentError: the vectors are of different lengths, or a size, `block` or `window` is out of range.
    """

    sizes: npt.NDArray[np.int64]
    """`[K]` samples in an epoch of each dataset, each at least 1."""
    keys: npt.NDArray[np.uint64]
    """`[K]` seed of each dataset's stream of epoch keys."""
    block: int = 1
    """Samples in a block, at least 1: see `trackbed.kernels.permute_blocks`."""
    window: int = 1
    """Blocks whose samples are shuffled together, at least 1; no effect if `block` is 1."""
    permutations: npt.NDArray[np.uint64] = field(init=False, repr=False)
    """`[K * words]` constants that the kernel precomputes for each size."""

    def __post_init__(self) -> None:
        check_blocks(self.block, self.window)
        _check_vector("sizes", self.sizes, np.int64)
        _check_vector("keys", self.keys, np.uint64)
        if len(self.sizes) != len(self.keys):
            raise ArgumentError(f"sizes and keys must have one length, found {len(self.sizes)} and {len(self.keys)}")
        if (self.sizes < 1).any():
            dataset = int(self.sizes.argmin())
            raise ArgumentError(f"sizes must be at least 1, dataset {dataset} has {self.sizes[dataset]}")
        object.__setattr__(self, "permutations", _native.permutations_of(self.sizes))


def instant_locate(
    trees: BlendTrees,
    shuffles: EpochShuffles,
    positions: npt.NDArray[np.int64],
    datasets: npt.NDArray[np.int32],
    draws: npt.NDArray[np.int64],
    samples: npt.NDArray[np.int64],
    *,
    num_threads: int = 1,
    poll: Poll = None,
) -> None:
    """Fills the outputs with the dataset, draw number and sample at each position of the instant order.

    Args:
        trees: the tree of each stage.
        shuffles: the shuffles of the datasets, as many as in the trees.
        positions: `[N]` each at least 0, in any order.
        datasets: `[N]` receives the dataset.
        draws: `[N]` receives the number of earlier draws from that dataset.
        samples: `[N]` receives the sample of that dataset.
        num_threads: at least 1; the result does not depend on it.
        poll: progress callback.

    Raises:
        ArgumentError: an argument is out of range, or an output cannot be written in place.
    """
    if num_threads < 1:
        raise ArgumentError(f"num_threads must be at least 1, found {num_threads}")
    if len(shuffles.sizes) != trees.num_datasets:
        raise ArgumentError(
            f"shuffles must have {trees.num_datasets} datasets as the trees, found {len(shuffles.sizes)}"
        )
    _check_vector("positions", positions, np.int64)
    if len(positions) and int(positions.min()) < 0:
        step = int(positions.argmin())
        raise ArgumentError(f"positions must be at least 0, but positions[{step}] = {positions[step]}")
    check_output("datasets", datasets, dtypes=(np.int32,))
    check_output("draws", draws, dtypes=(np.int64,))
    check_output("samples", samples, dtypes=(np.int64,))
    if not positions.shape == datasets.shape == draws.shape == samples.shape:
        shapes = ", ".join(str(list(array.shape)) for array in (positions, datasets, draws, samples))
        raise ArgumentError(
            f"positions, datasets, draws and samples must be vectors of one length, found shapes {shapes}"
        )
    _native.instant_locate(
        trees.nodes.view(np.uint64),
        trees.first_samples,
        trees.first_nodes,
        trees.roots,
        trees.ramps,
        trees.parents,
        shuffles.permutations,
        shuffles.keys,
        shuffles.block,
        shuffles.window,
        positions,
        datasets,
        draws,
        samples,
        num_threads,
        current_poll(poll),
    )


def draw_phases(nodes: npt.NDArray[np.void], num_datasets: int, key: int) -> None:
    """Draws the phases of a tree's inner nodes in place, spread around 1/2 as widely as the bound on shares allows.

    Args:
        nodes: one stage's `NODE`s as in `BlendTrees`; the last one is the root unless all of them are leaves.
        num_datasets: number of leaves.
        key: seed of the stream of words from which phases are drawn, in `[0, 2**64)`.

    Raises:
        ArgumentError: the nodes are not such a tree, or cannot be written in place.
    """
    _check_vector("nodes", nodes, NODE)
    words = nodes.view(np.uint64)
    check_output("nodes", words, dtypes=(np.uint64,))
    _check_block(num_datasets, nodes, len(nodes) - 1, 0)
    _native.draw_phases(words, num_datasets, key)


def interleaving_counts(trees: BlendTrees, position: int) -> npt.NDArray[np.int64]:
    """`[K]` number of draws from each dataset before a position.

    Args:
        trees: the tree of each stage.
        position: in `[0, 2**63)`.

    Raises:
        ArgumentError: `position` is out of range.
    """
    if not 0 <= position <= _LAST_POSITION:
        raise ArgumentError(f"position must be in [0, 2**63), found {position}")
    stage = int(np.searchsorted(trees.first_samples, position, side="right")) - 1
    position_in_stage, length = position - int(trees.first_samples[stage]), int(trees.ramps[stage])
    if not length:
        return _stage_counts(trees, stage, position_in_stage)
    after = ramp_count(position_in_stage, length)
    return _stage_counts(trees, stage - 1, position_in_stage - after) + _stage_counts(trees, stage, after)


def ramp_count(k: int, length: int) -> int:
    """Number of samples drawn with the weights after a ramp, among its first `k`: floor(k**2 / (2 length) + 1/2).

    >>> [ramp_count(k, 8) for k in range(9)]
    [0, 0, 0, 1, 1, 2, 2, 3, 4]
    """
    return (k * k + length) // (2 * length)


def _stage_counts(trees: BlendTrees, stage: int, draws: int) -> npt.NDArray[np.int64]:
    counts = np.empty(trees.num_datasets, dtype=np.int64)
    _native.interleaving_counts(trees.block(stage).view(np.uint64), int(trees.roots[stage]), draws, counts)
    return counts


def _check_types(trees: BlendTrees) -> None:
    _check_vector("nodes", trees.nodes, NODE)
    _check_vector("first_samples", trees.first_samples, np.int64)
    _check_vector("first_nodes", trees.first_nodes, np.int64)
    _check_vector("roots", trees.roots, np.uint32)
    _check_vector("ramps", trees.ramps, np.int64)
    lengths = [len(trees.first_samples), len(trees.first_nodes), len(trees.roots), len(trees.ramps)]
    if min(lengths) < 1 or min(lengths) != max(lengths):
        raise ArgumentError(
            f"first_samples, first_nodes, roots and ramps must have one length of at least 1, found {lengths}"
        )
    if not 1 <= trees.num_datasets <= _MOST_DATASETS:
        raise ArgumentError(f"num_datasets must be in [1, {_MOST_DATASETS}], found {trees.num_datasets}")
    for name, firsts in (("first_samples", trees.first_samples), ("first_nodes", trees.first_nodes)):
        if firsts[0] != 0 or (np.diff(firsts) < 0).any():
            raise ArgumentError(f"{name} must begin with 0 and never decrease, found {firsts.tolist()[:10]}")
    for stage in np.flatnonzero(trees.ramps).tolist():
        length, before = trees.ramps[stage], stage - 1
        if length < 0 or stage == 0 or trees.ramps[before] or np.diff(trees.first_samples)[before]:
            raise ArgumentError(
                f"stage {stage}: a ramp must have at least 0 samples and begin with a stage of constant weights, "
                f"found {length} samples"
            )
    if trees.first_nodes[-1] > len(trees.nodes):
        raise ArgumentError(f"first_nodes must be in [0, {len(trees.nodes)}], found {trees.first_nodes[-1]}")


def _check_block(num_datasets: int, block: npt.NDArray[np.void], root: int, stage: int) -> None:
    if len(block) < num_datasets or root >= len(block):
        raise ArgumentError(
            f"stage {stage}: a block must have {num_datasets} leaves and its root {root}, found {len(block)} nodes"
        )
    leaves, inner = block[:num_datasets], block[num_datasets:]
    if leaves["share"].any() or (leaves["right"] != np.arange(num_datasets)).any():
        raise ArgumentError(f"stage {stage}: a leaf must have the share 0 and itself as the right child")
    numbers = np.arange(num_datasets, len(block))
    if (inner["share"] == 0).any() or (np.maximum(inner["left"], inner["right"]) >= numbers).any():
        raise ArgumentError(f"stage {stage}: an inner node must have a share above 0 and come after its children")


def _check_vector(name: str, array: npt.NDArray[Any], dtype: npt.DTypeLike) -> None:
    if array.ndim != 1 or array.dtype != dtype or not (array.flags.c_contiguous and array.flags.aligned):
        wanted = "nodes" if dtype is NODE else np.dtype(dtype).name
        raise ArgumentError(
            f"{name} must be a contiguous vector of {wanted}, found {array.dtype} and shape {list(array.shape)}"
        )
