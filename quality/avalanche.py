"""What one changed bit of the seed, or of the position, changes of the image.

Shapes: I bits of the input, B leading bits of the image.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quality.check import Law, Statistic
from quality.shuffles import Positions, Shuffle


def avalanche(
    shuffle: Shuffle, size: int, seeds: Sequence[int], *, per_seed: int, seed_bits: int = 64
) -> list[Statistic]:
    """How often each leading bit of the image changes with each bit of the seed, and of the position.

    Images are cut into 2**B equal blocks, whose number has the bits. Two images of one permutation differ, so that a
    bit changes with a probability that is slightly above a half; those of two permutations may be equal.

    Args:
        shuffle: what is looked at.
        size: of the permutations, at least 64.
        seeds: of the permutations.
        per_seed: positions of each, few beside the size, so that they are nearly independent.
        seed_bits: how many bits of the seed matter.
    """
    num_bits = min(16, size.bit_length() - 6)
    position_bits = size.bit_length() - 1
    by_seed = np.zeros((seed_bits, num_bits))
    by_position = np.zeros((position_bits, num_bits))
    for seed in seeds:
        generator = np.random.default_rng([seed, size])
        positions = generator.integers(0, 1 << position_bits, per_seed)
        images = shuffle(size, seed)
        bits = _leading(images(positions), size, num_bits)
        for bit in range(seed_bits):
            by_seed[bit] += _changes(bits, _leading(shuffle(size, seed ^ 1 << bit)(positions), size, num_bits))
        flipped = positions ^ 1 << np.arange(position_bits)[:, None]
        others = _leading(images(flipped.reshape(-1)), size, num_bits).reshape(position_bits, -1, num_bits)
        for bit in range(position_bits):
            by_position[bit] += _changes(bits, others[bit])
    trials = len(seeds) * per_seed
    ones = _ones(size, num_bits)
    return [
        _statistic("avalanche of the seed", size, by_seed, trials, 2 * ones * (size - ones) / size**2),
        _statistic(
            "avalanche of the position", size, by_position, trials, 2 * ones * (size - ones) / (size * (size - 1))
        ),
    ]


def _leading(images: Positions, size: int, num_bits: int) -> npt.NDArray[np.bool_]:
    """`[N, B]` bits of the number of the block that each image is in."""
    blocks = images * (1 << num_bits) // size
    return (blocks[:, None] >> np.arange(num_bits) & 1).astype(np.bool_)


def _changes(bits: npt.NDArray[np.bool_], others: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    changes: npt.NDArray[np.float64] = (bits ^ others).sum(axis=0, dtype=np.float64)
    return changes


def _ones(size: int, num_bits: int) -> npt.NDArray[np.float64]:
    """`[B]` how many of all images have a 1 there."""
    borders = -(-np.arange((1 << num_bits) + 1) * size // (1 << num_bits))
    blocks = np.arange(1 << num_bits)[:, None] >> np.arange(num_bits) & 1
    ones: npt.NDArray[np.float64] = (blocks * np.diff(borders)[:, None]).sum(axis=0, dtype=np.float64)
    return ones


def _statistic(
    name: str, size: int, changes: npt.NDArray[np.float64], trials: int, chance: npt.NDArray[np.float64]
) -> Statistic:
    value = float(((changes - trials * chance) ** 2 / (trials * chance * (1 - chance))).sum())
    return Statistic(size=size, name=name, value=value, mean=changes.size, variance=2 * changes.size, law=Law.GAMMA)
