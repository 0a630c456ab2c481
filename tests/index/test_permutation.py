import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.index import PERMUTATION_VERSION, BlockPermutation, Permutation
from trackbed.kernels import available_levels, reference

KEYS = st.integers(0, 2**64 - 1)

# (size, seed): images of positions 0, 1, 2, the middle one and the last one. A change here is a new version.
GOLDEN = {
    (1, 0): [0, 0, 0],
    (2, 1): [0, 1, 1, 1],
    (3, 0): [0, 1, 2, 1, 2],
    (10, 1_234): [0, 1, 2, 6, 7],
    (25, 8): [3, 12, 6, 19, 2],
    (100, 0): [44, 35, 56, 28, 62],
    (1_000, 1): [962, 771, 635, 596, 590],
    (65_537, 3): [58718, 11638, 44733, 50444, 14049],
    (1_000_000, 18_446_744_073_709_551_615): [704127, 506459, 548484, 733405, 381083],
    (1_073_741_824, 5): [61652668, 627796333, 964419926, 586279223, 802065672],
    (1_000_000_007, 1): [285671407, 925354190, 220104004, 593456597, 103001522],
    (1_000_000_000_039, 42): [791791903308, 882081431765, 843356490727, 980701448972, 625663851164],
    (9_223_372_036_854_775_807, 7): [
        823051160648232347,
        4295038506192951771,
        5680378237812214949,
        34975542805893835,
        4496798211653872209,
    ],
}
GOLDEN_BLOCKS = {
    (10, 1_234, 4, 2): [9, 4, 8, 5, 1],
    (1_000, 0, 16, 8): [42, 328, 323, 527, 669],
    (1_000_000_007, 1, 64, 16): [825042856, 825042830, 675806860, 402830524, 61114147],
    (1_000_000_000_039, 2, 4096, 256): [50825513390, 370201703661, 714961248521, 446824472834, 607234062425],
}


def probes(size):
    return [position for position in (0, 1, 2) if position < size] + [size // 2, size - 1]


def test_golden_vectors_of_version_1(level):
    assert PERMUTATION_VERSION == 1
    for (size, seed), images in GOLDEN.items():
        assert Permutation(size, seed=seed)(np.array(probes(size))).tolist() == images


def test_golden_vectors_of_blocks(level):
    for (size, seed, block, window), images in GOLDEN_BLOCKS.items():
        shuffle = BlockPermutation(size, seed=seed, block=block, window=window)
        assert shuffle(np.array(probes(size))).tolist() == images


@given(st.integers(1, 2**63 - 1), KEYS, st.data())
def test_position_by_position_is_the_same_as_all_at_once(size, seed, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    for shuffle in (Permutation(size, seed=seed), BlockPermutation(size, seed=seed, block=7, window=3)):
        images = shuffle(np.array(positions, dtype=np.uint64))
        assert images.dtype == np.int64
        assert images.tolist() == [shuffle(position) for position in positions]
        assert len(shuffle) == size


@given(st.integers(1, 5_000), KEYS)
def test_every_sample_comes_once(size, seed):
    images = Permutation(size, seed=seed)(np.arange(size))
    assert sorted(images.tolist()) == list(range(size))


@given(st.integers(1, 400), KEYS, st.integers(1, 450), st.integers(1, 60))
@example(size=10, seed=3, block=3, window=1)
@example(size=7, seed=2**64 - 1, block=2**62, window=2**62)
def test_blocks_equal_the_reference_at_every_level(size, seed, block, window):
    wanted = reference.permute_blocks(size, key=seed, block=block, window=window)
    assert np.array_equal(np.sort(wanted), np.arange(size))
    shuffle = BlockPermutation(size, seed=seed, block=block, window=window)
    with pytest.MonkeyPatch.context() as patch:
        for level in available_levels():
            patch.setenv("TRACKBED_ISA", level)
            assert np.array_equal(shuffle(np.arange(size)), wanted)
            assert np.array_equal(shuffle(np.arange(size)[::-1]), wanted[::-1])


@pytest.mark.parametrize(("block", "window"), [(1, 1), (1, 9), (16, 1), (16, 8), (1_000, 4), (99_999, 2)])
def test_every_sample_comes_once_in_blocks(level, block, window):
    size = 100_003
    images = BlockPermutation(size, seed=5, block=block, window=window)(np.arange(size), num_threads=2)
    assert np.array_equal(np.sort(images), np.arange(size))


def test_a_window_holds_the_samples_of_its_blocks():
    images = BlockPermutation(10_000, seed=5, block=20, window=4)(np.arange(10_000))
    for start in range(0, 10_000, 80):
        assert len(np.unique(images[start : start + 80] // 20)) == 4


def test_blocks_of_one_sample_are_the_full_permutation():
    positions = np.arange(1_000)
    assert np.array_equal(
        BlockPermutation(1_000, seed=8, block=1, window=5)(positions), Permutation(1_000, seed=8)(positions)
    )


def test_the_last_shorter_block_moves_like_the_others():
    ends = [int(BlockPermutation(10, seed=seed, block=4, window=1)(np.arange(10))[-1]) // 4 for seed in range(60)]
    assert set(ends) == {0, 1, 2}


def test_another_seed_or_size_is_another_permutation():
    positions = np.arange(1_000)
    images = {tuple(Permutation(size, seed=seed)(positions)) for size in (1_000, 1_001) for seed in range(20)}
    assert len(images) == 40
    # Sizes 1,023 and 1,024 share a grid of 32 x 32.
    near = Permutation(1_024, seed=1)(positions) == Permutation(1_023, seed=1)(positions)
    assert near.sum() < 10


def test_positions_may_have_any_shape_and_integer_type():
    shuffle = Permutation(100, seed=1)
    wanted = shuffle(np.arange(12))
    assert np.array_equal(shuffle(np.arange(12, dtype=np.uint8).reshape(3, 4)), wanted.reshape(3, 4))
    assert np.array_equal(shuffle(np.arange(24)[::2].T[:6]), shuffle(np.arange(0, 12, 2)))
    assert shuffle(np.empty(0, np.int64)).tolist() == []
    assert isinstance(shuffle(np.int32(3)), int)


@pytest.mark.parametrize(
    "positions", [-1, 100, np.array([3, 100]), np.array([2**64 - 1], np.uint64), 2**63, 2**64, 2**70]
)
def test_positions_outside_are_refused(positions):
    for shuffle in (Permutation(100, seed=1), BlockPermutation(100, seed=1, block=10, window=2)):
        with pytest.raises(ArgumentError, match="positions must be"):
            shuffle(positions)


@pytest.mark.parametrize("positions", [1.0, np.array([1.0]), True, np.array([True]), "1", None])
def test_positions_must_be_integers(positions):
    with pytest.raises(ArgumentError, match="positions must be integers"):
        Permutation(100, seed=1)(positions)


@pytest.mark.parametrize(("size", "seed"), [(0, 0), (2**63, 0), (5, -1), (5, 2**64)])
def test_sizes_and_seeds_out_of_range_are_refused(size, seed):
    with pytest.raises(ArgumentError, match=r"must be (a whole number )?in"):
        Permutation(size, seed=seed)
    with pytest.raises(ArgumentError, match=r"must be (a whole number )?in"):
        BlockPermutation(size, seed=seed, block=1, window=1)


@pytest.mark.parametrize(("block", "window"), [(0, 1), (1, 0), (2**63, 1), (1, 2**63)])
def test_blocks_and_windows_out_of_range_are_refused(block, window):
    with pytest.raises(ArgumentError, match=r"block and window must be in \[1, 2\*\*63\), found"):
        BlockPermutation(10, seed=0, block=block, window=window)
