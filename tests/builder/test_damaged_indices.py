"""A damaged number in an index is an error that names the file, or a legal one that `cache verify` finds."""

import numpy as np
import pytest

from tests.support.files.blends import build, gpt_config, write_pairs
from tests.support.files.small_entries import problems
from tests.support.tiers import slow_but
from trackbed.errors import CacheError
from trackbed.loading import BatchStream, MegatronPretrainingSampler, provenance

SIZES = (60, 12, None)
HEADER_BYTES = 128


def config_of(folder, order, *, keep_partial):
    return gpt_config(
        folder / "cache",
        blend=([str(folder / f"pair{number}") for number in range(3)], [3, 2, 1]),
        split="8,2,0",
        order=order,
        create_cu_seqlens=True,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=not keep_partial,
    )


def plain(sample):
    return {name: np.asarray(value).tolist() for name, value in sample.items()}


def each(get, count):
    """What `get` gives at each position: samples, or the words of an error of the cache."""
    found = []
    for position in range(count):
        try:
            found.append(get(position))
        except CacheError as error:
            found.append(str(error))
    return found


def observed(dataset):
    """The samples of a dataset, had in each way that there is."""
    count = len(dataset)
    yield each(lambda position: plain(dataset[position]), count)
    yield each(lambda position: plain(dataset[position - count]), count)
    yield each(lambda position: plain(dataset.gather([position]).samples()[0]), count)
    yield each(lambda position: plain(dataset.__getitems__([position])[0]), count)


def iterated(samples, wanted):
    """Iterating gives every sample, or ends with the error that its first damaged sample raises."""
    first = next((number for number, sample in enumerate(wanted) if isinstance(sample, str)), len(wanted))
    found, words = [], None
    try:
        for some in samples:
            found += some
    except CacheError as error:
        words = str(error)
    assert [plain(one) for one in found] == wanted[:first]
    assert words == (wanted[first] if first < len(wanted) else None)


def check_dataset(dataset, before, cache):
    first, *others = observed(dataset)
    for other in others:
        assert other == first
    assert len(first) == len(before) == len(dataset)
    for error in (sample for sample in first if isinstance(sample, str)):
        paths = [word for word in error.partition(": must hold")[0].split(", ") if word.endswith(".npy")]
        assert paths, error
        assert all(path.startswith(str(cache)) for path in paths), error
        assert "trackbed cache verify" in error
    iterated(([sample] for sample in dataset), first)
    sampler = MegatronPretrainingSampler(len(dataset), 0, 1, 0, 1)
    iterated((batch.samples() for batch in BatchStream(dataset, sampler)), first)
    origins = each(lambda position: provenance(dataset, position), len(dataset))
    assert [isinstance(one, str) for one in origins] == [isinstance(one, str) for one in first]
    return first


def flip(path, rng):
    """Replace one number of an index by another one, near or far. Returns what it was and where."""
    raw = path.read_bytes()
    header = raw[:HEADER_BYTES].decode("latin-1")
    dtype = np.dtype(header.partition("'descr': '")[2].partition("'")[0])
    numbers = np.frombuffer(raw[HEADER_BYTES:], dtype=dtype).copy()
    at = int(rng.integers(len(numbers)))
    limits = np.iinfo(dtype)
    near = int(numbers[at]) + int(rng.choice([-2, -1, 1, 2, 5]))
    far = int(rng.choice([limits.min, limits.max, min(2**30, limits.max), -1 % (limits.max + 1), 0]))
    value = near if rng.random() < 0.5 and limits.min <= near <= limits.max else far
    if value == numbers[at]:
        value = int(numbers[at]) ^ 1
    numbers[at] = value
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(numbers.tobytes())
    return raw


def check_flips(folder, order, count, seed, *, keep_partial=False):
    write_pairs(folder)
    config, rng = config_of(folder, order, keep_partial=keep_partial), np.random.default_rng(seed)
    datasets = [one for one in build(config, SIZES) if one is not None]
    before = [[plain(one[position]) for position in range(len(one))] for one in datasets]
    files = sorted((folder / "cache").rglob("*.npy"))
    assert len(files) >= 20
    refused = legal = 0
    for number in range(count):
        path = files[number % len(files)]
        raw = flip(path, rng)
        found = [
            check_dataset(one, wanted, folder / "cache")
            for one, wanted in zip([one for one in build(config, SIZES) if one is not None], before, strict=True)
        ]
        has_error = any(isinstance(sample, str) for samples in found for sample in samples)
        refused += has_error
        legal += not has_error
        assert any(str(path) in problem for problem in problems(folder / "cache"))
        path.write_bytes(raw)
    return refused, legal


@pytest.mark.parametrize(
    ("order", "keep_partial"),
    slow_but(
        [("megatron", True), ("balanced", False)],
        [("megatron", False), ("megatron", True), ("balanced", False), ("balanced", True)],
    ),
)
def test_a_flipped_number_is_an_error_that_names_the_file_or_legal_and_found_by_verify(tmp_path, order, keep_partial):
    refused, _ = check_flips(tmp_path, order, 25, 1, keep_partial=keep_partial)
    assert refused > 0


@pytest.mark.slow
@pytest.mark.parametrize("keep_partial", [False, True])
@pytest.mark.parametrize("order", ["megatron", "balanced"])
def test_a_thousand_flipped_numbers(tmp_path, order, keep_partial):
    refused, legal = check_flips(tmp_path, order, 250, 2, keep_partial=keep_partial)
    assert refused > 50
    assert legal > 5


def test_an_iteration_over_a_damaged_index_does_not_end_early(tmp_path):
    """One entry of a shuffle index is 2**30: the loop raises there, and does not take it for the end."""
    write_pairs(tmp_path)
    config = gpt_config(tmp_path / "cache", blend=([str(tmp_path / "pair2")], None), split="1")
    build(config, (100, None, None))
    path = next((tmp_path / "cache").glob("*-train-shuffle_index.npy"))
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 4 * 43)
        file.write((2**30).to_bytes(4, "little"))
    train = build(config, (100, None, None))[0]
    found = []
    with pytest.raises(CacheError, match=r"shuffle_index\.npy: must hold rows .* 1073741824 at position 43; .*verify"):
        found.extend(train)
    assert len(found) in (0, 43)


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_only_positions_outside_are_index_errors(tmp_path, order):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), [3, 2, 1]), split="1", order=order)
    train = build(config, (50, None, None))[0]
    for dataset in (train, train.datasets[0]):
        count = len(dataset)
        for position in (count, -count - 1, 2**62, np.int64(count)):
            with pytest.raises(IndexError, match=r"a sample must be in \[-"):
                dataset[position]
            with pytest.raises(IndexError):
                dataset.gather([position])
        assert len(list(dataset)) == count


class _Broken(list):
    def __getitem__(self, position):
        raise IndexError("from inside")


def test_an_index_error_from_inside_a_member_is_raised(tmp_path):
    config = gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), [3, 2, 1]), split="1")
    train = build(config, (50, None, None))[0]
    for member in train.datasets:
        member.dataset.__dict__["bin_reader"] = type("Reader", (), {"read": lambda *_: _Broken()[0]})()
    with pytest.raises(IndexError, match="from inside"):
        list(train)
