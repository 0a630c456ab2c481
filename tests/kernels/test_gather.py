"""Tests of the gather kernel against its reference, over files in memory."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes.forked import run_in_fork
from trackbed.errors import ArgumentError
from trackbed.kernels import BatchArrays, Extent, FetchedBytes, SampleShape, SampleSources, Visits, gather, reference

CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}
EOD, PAD = 9, 7


def arrays(size, length, *, borders=True, mask=True, fill=3):
    """Output arrays of a batch, filled with other values."""
    shapes = dict.fromkeys(("tokens", "labels", "position_ids"), ((size, length), np.int64))
    shapes["loss_mask"] = ((size, length), np.float32)
    if mask:
        shapes["attention_mask"] = ((size, length, length), np.bool_)
    if borders:
        shapes |= {"cu_seqlens": ((size, length + 1), np.int32), "max_seqlen": ((size,), np.int32)}
    return BatchArrays({name: np.full(shape, fill, dtype=dtype) for name, (shape, dtype) in shapes.items()})


def add_files(sources, lengths_of_files, dtype, rng):
    """Adds files of random tokens whose sequences have these lengths."""
    size = np.dtype(dtype).itemsize
    sequences = first_byte = 0
    extents, mapped = [], []
    for lengths in lengths_of_files:
        total = sum(lengths)
        tokens = rng.integers(0, 12, total).astype(dtype)
        raw = np.frombuffer(tokens.tobytes(), dtype=np.uint8)
        pointers = (np.cumsum([0, *lengths])[:-1] * size).astype(np.int64)
        extents.append(Extent(len(lengths), sequences, first_byte, total * size))
        mapped.append(
            {"tokens": raw, "lengths": unaligned(lengths, np.int32), "pointers": unaligned(pointers, np.int64)}
        )
        sequences += len(lengths)
        first_byte += total * size
    first = sources.add_files(extents)
    return {"first_file": first, "num_files": len(extents), "dtype": CODES[dtype]}, mapped


def unaligned(numbers, dtype):
    """An array at an odd address, as in an index file."""
    raw = b"\0" + np.array(numbers, dtype=dtype).tobytes()
    return np.frombuffer(raw, dtype=dtype, offset=1)


def map_all(sources, files, mapped):
    for number, one in enumerate(mapped, files["first_file"]):
        sources.map_file(number, **one)


@st.composite
def datasets(draw):
    """Sources of one to three datasets with all files mapped, and the number of samples of each."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    length, extra = draw(st.integers(1, 70)), draw(st.integers(0, 1))
    sources = SampleSources(draw(st.integers(1, 3)))
    counts = []
    for number in range(len(sources.source_table)):
        longest = draw(st.sampled_from([1, 5, 2 * length]))
        shapes = [rng.integers(0, longest + 1, rng.integers(1, 20)).tolist() for _ in range(draw(st.integers(1, 3)))]
        files, mapped = add_files(sources, shapes, draw(st.sampled_from(sorted(CODES, key=repr))), rng)
        map_all(sources, files, mapped)
        lengths = np.concatenate(shapes).astype(np.int64)
        total = int(lengths.sum())
        if draw(st.booleans()):
            count = max(total - extra, 0) // length
            sources.place_stretches(number, num_samples=count, origin_byte=0, **files)
        else:
            count = max(-(-(total - extra) // length), 0) if total else 0
            visits = rng.permutation(len(lengths)).astype(draw(st.sampled_from([np.int32, np.int64])))
            rows = reference.sample_index(lengths, visits, count, sequence_length=length, extra_token=extra)
            shuffle = rng.permutation(count).astype(draw(st.sampled_from([np.uint32, np.int64])))
            row_type = np.int64 if visits.dtype == np.int64 else draw(st.sampled_from([np.int32, np.int64]))
            sources.place_visits(
                number, visits=Visits(visits, rows.astype(row_type), shuffle, may_be_short=True), **files
            )
        counts.append(count)
    shape = SampleShape(
        length=length,
        extra=extra,
        pad=draw(st.sampled_from([-1, PAD, EOD])),
        eod=EOD,
        resets_positions=draw(st.booleans()),
        masks_eod=draw(st.booleans()),
        keeps_documents_apart=draw(st.booleans()),
        masks_borders=draw(st.booleans()),
    )
    return sources, counts, shape, rng


def with_fetched_bytes(sources, gathered, rng):
    """Gathers with some files unmapped, of which only what is missing is passed, in pieces of at least one span."""
    mapped = [(number, files) for number, files in enumerate(sources.files) if rng.random() < 0.7]
    for number, (tokens, lengths, pointers) in mapped:
        sources.map_file(number, tokens=None, lengths=lengths, pointers=pointers, size_bytes=len(tokens))
    missing = {tuple(row) for row in gathered(FetchedBytes()).missing.tolist()}
    whole = dict(mapped)
    pieces = {(file, start): whole[file][0][start:stop].copy() for file, start, stop in sorted(missing)}
    assert gathered(FetchedBytes([(*place, found) for place, found in pieces.items()])).is_whole
    assert bool(missing) == (not gathered(FetchedBytes()).is_whole)
    for number, (tokens, lengths, pointers) in mapped:
        sources.map_file(number, tokens=tokens, lengths=lengths, pointers=pointers)


@given(data=datasets(), num_threads=st.integers(1, 3), has_mask=st.booleans())
def test_gather_equals_its_reference(data, num_threads, has_mask):
    sources, counts, shape, rng = data
    drawn = [number for number, count in enumerate(counts) if count]
    if not drawn:
        return
    chosen = rng.choice(drawn, 9).astype(np.int32)
    positions = np.array([rng.integers(0, counts[number]) for number in chosen], dtype=np.int64)
    batch = arrays(9, shape.length, mask=has_mask)
    assert gather(sources, chosen, positions, batch, shape, num_threads=num_threads).is_whole
    fetched = arrays(9, shape.length, mask=has_mask)
    with_fetched_bytes(sources, lambda bytes_: gather(sources, chosen, positions, fetched, shape, fetched=bytes_), rng)
    for name, array in batch.arrays.items():
        np.testing.assert_array_equal(fetched.arrays[name], array)
    for at, (number, position) in enumerate(zip(chosen.tolist(), positions.tolist(), strict=True)):
        wanted = reference.gather_sample(sources, number, position, shape)
        for name, array in batch.arrays.items():
            assert array[at].tolist() == wanted[name].tolist(), name


def test_a_short_sample_of_more_empty_documents_than_places_has_its_borders():
    sources, lengths = SampleSources(1), [1, *[0] * 6, 1, 1]
    files, mapped = add_files(sources, [lengths], np.uint16, np.random.default_rng(0))
    map_all(sources, files, mapped)
    visits = Visits(
        np.arange(len(lengths), dtype=np.int32), np.array([[0, 0], [len(lengths) - 1, 0]]), np.zeros(1, np.int64), True
    )
    sources.place_visits(0, visits=visits, **files)
    shape = SampleShape(length=4, extra=1, pad=-1, eod=EOD, keeps_documents_apart=True)
    batch = arrays(1, 4, mask=False)
    assert gather(sources, np.zeros(1, np.int32), np.zeros(1, np.int64), batch, shape).is_whole
    assert batch.arrays["cu_seqlens"][0].tolist() == [0, 1, 2, 4, 4]
    wanted = reference.gather_sample(sources, 0, 0, shape)
    assert batch.arrays["position_ids"][0].tolist() == wanted["position_ids"].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("dtype", CODES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("offset", range(9))
def test_every_level_widens_every_type_from_any_address_to_any_place(level, dtype, offset):
    rng = np.random.default_rng(0)
    sources = SampleSources(1)
    limits = np.iinfo(dtype)
    files, _ = add_files(sources, [[200]], dtype, rng)
    tokens = rng.integers(limits.min, limits.max, 200, dtype=dtype, endpoint=True)
    raw = np.frombuffer(b"\0" * offset + tokens.tobytes(), dtype=np.uint8)[offset:]
    sources.map_file(0, tokens=raw, lengths=np.array([200], np.int32), pointers=np.array([0], np.int64))
    sources.place_stretches(0, num_samples=180, origin_byte=offset * np.dtype(dtype).itemsize, **files)
    shape = SampleShape(length=19 + offset, extra=1, pad=limits.max + 1 if dtype != np.int64 else -1, eod=-5)
    batch = arrays(5, shape.length, mask=False)
    assert gather(sources, np.zeros(5, np.int32), np.arange(5), batch, shape).is_whole
    for at in range(5):
        start = offset + at * shape.length
        wanted = tokens[start : start + shape.length + 1].astype(np.int64)
        if dtype == np.int64:
            wanted = np.where(wanted == -1, 0, wanted)
        assert batch.arrays["tokens"][at].tolist() == wanted[:-1].tolist()
        assert batch.arrays["labels"][at].tolist() == wanted[1:].tolist()


def small(*, rows=((0, 0), (0, 4)), shuffle=(0,), visits=(0,), lengths=(8,), pointers=(0,), num_tokens=8, first=0):
    """One dataset of one file with one sample of four tokens, any part of which can be made invalid."""
    sources = SampleSources(1)
    number = sources.add_files([Extent(len(lengths), first, 0, 2 * num_tokens)])
    sources.map_file(
        number,
        tokens=np.arange(num_tokens, dtype=np.uint16).view(np.uint8),
        lengths=np.array(lengths, np.int32),
        pointers=np.array(pointers, np.int64),
    )
    given_visits = Visits(np.array(visits, np.int64), np.array(rows, np.int64), np.array(shuffle, np.int64))
    sources.place_visits(0, first_file=number, num_files=1, dtype=8, visits=given_visits)
    return sources


SHAPE = SampleShape(length=4, extra=1, pad=-1, eod=99)
FAR = 2**62


def outcome(sources, *positions):
    batch = arrays(len(positions), 4, mask=False)
    return gather(sources, np.zeros(len(positions), np.int32), np.array(positions), batch, SHAPE)


def test_the_valid_sample_is_gathered():
    assert outcome(small(), 0, -1).is_whole


@pytest.mark.parametrize(
    "damage",
    [
        {"shuffle": (1,)},
        {"shuffle": (-1,)},
        {"shuffle": (FAR,)},
        {"rows": ((1, 0), (1, 4))},
        {"rows": ((-1, 0), (0, 4))},
        {"rows": ((0, 0), (1, 4))},
        {"rows": ((0, 0), (FAR, 4))},
        {"rows": ((0, 4), (0, 0))},
        {"rows": ((0, -1), (0, 3))},
        {"rows": ((0, FAR), (0, FAR))},
        {"rows": ((0, -FAR), (0, 4))},
        {"rows": ((0, 0), (0, FAR))},
        {"rows": ((0, 0), (0, -FAR))},
        {"rows": ((0, 0), (0, 5))},
        {"rows": ((0, 4), (0, 8))},
        {"rows": ((0, 0), (0, 3))},
        {"rows": ((0, 1), (0, 4))},
        {"visits": (0, 0), "rows": ((0, 0), (1, -1))},
        {"lengths": (4,)},
        {"visits": (0, 0), "rows": ((0, 1), (1, 0)), "lengths": (3,)},
        {"visits": (1,)},
        {"visits": (-1,)},
        {"visits": (FAR,)},
        {"visits": (0, 0), "rows": ((0, 0), (1, 4)), "lengths": (-8,)},
        {"visits": (0, 0), "rows": ((0, 0), (1, 1)), "lengths": (2**31 - 1,)},
        {"pointers": (-2,)},
        {"pointers": (8,)},
        {"pointers": (FAR,)},
        {"pointers": (2**63 - 1,)},
        {"pointers": (-(2**63),)},
        {"num_tokens": 4},
        {"num_tokens": 0},
        {"first": 1},
    ],
    ids=repr,
)
def test_an_invalid_span_is_refused_and_the_first_such_sample_named(damage):
    assert outcome(small(**damage), 0).refused == 0


def test_only_the_last_row_may_be_short():
    def outcomes(*, may_be_short):
        sources = small()
        rows, shuffle = np.array([(0, 0), (0, 2), (0, 3)]), np.array([0, 1])
        visits = Visits(np.array([0]), rows, shuffle, may_be_short=may_be_short)
        sources.place_visits(0, first_file=0, num_files=1, dtype=8, visits=visits)
        return [outcome(sources, position).refused for position in (0, 1)]

    assert outcomes(may_be_short=True) == [0, None]
    assert outcomes(may_be_short=False) == [0, 0]


@pytest.mark.parametrize("position", [1, -2, FAR, -FAR, 2**63 - 1, -(2**63)])
def test_a_position_out_of_range_is_refused(position):
    assert outcome(small(), 0, position).refused == 1


@pytest.mark.parametrize(
    ("origin", "count", "sample"),
    [(0, 3, 2), (0, 1, 1), (0, 1, -1), (10, 1, 0), (-2, 1, 0), (2**63 - 1, 1, 0), (0, 2**63 - 1, 2**61)],
)
def test_a_stretch_outside_the_file_is_refused(origin, count, sample):
    sources = small()
    sources.place_stretches(0, first_file=0, num_files=1, dtype=8, num_samples=count, origin_byte=origin)
    sources.source_table["visits"][0] = 0
    assert outcome(sources, sample).refused == 0


@pytest.mark.parametrize("dataset", [1, 2, -1, 2**31 - 1])
def test_a_dataset_that_was_not_placed_has_no_samples(dataset):
    sources = SampleSources(2)
    batch = arrays(1, 4, mask=False)
    assert gather(sources, np.array([dataset], np.int32), np.zeros(1, np.int64), batch, SHAPE).refused == 0


def test_files_that_are_not_mapped_are_named_all_at_once():
    sources = SampleSources(1)
    files, mapped = add_files(sources, [[3], [3], [3]], np.uint16, np.random.default_rng(0))
    sources.place_stretches(0, num_samples=2, origin_byte=0, **files)
    assert sorted(outcome(sources, 0, 1).absent) == [0, 1, 1, 2]
    map_all(sources, files, mapped)
    assert outcome(sources, 0, 1).is_whole


def test_an_empty_batch_is_whole():
    assert outcome(small()).is_whole


def test_output_arrays_of_another_shape_or_type_are_refused():
    good = arrays(2, 4).arrays
    for name, wrong in (
        ("labels", np.zeros((2, 5), np.int64)),
        ("labels", np.zeros((2, 4), np.int32)),
        ("labels", np.zeros((4, 2), np.int64).T),
        ("loss_mask", np.zeros((2, 4))),
        ("attention_mask", np.zeros((2, 4), np.bool_)),
        ("max_seqlen", np.zeros(3, np.int32)),
    ):
        with pytest.raises(ArgumentError, match=f"{name} must be writable, contiguous"):
            BatchArrays({**good, name: wrong})
    with pytest.raises(ArgumentError, match="cu_seqlens and max_seqlen must come together"):
        BatchArrays({name: array for name, array in good.items() if name != "max_seqlen"})


def test_arguments_that_do_not_belong_together_are_refused():
    sources, batch = small(), arrays(2, 4)
    zeros = np.zeros(2, np.int32)
    with pytest.raises(ArgumentError, match="must have one size"):
        gather(sources, zeros[:1], np.zeros(2, np.int64), batch, SHAPE)
    with pytest.raises(ArgumentError, match="num_threads must be at least 1, found 0"):
        gather(sources, zeros, np.zeros(2, np.int64), batch, SHAPE, num_threads=0)
    with pytest.raises(ArgumentError, match="length must be at least 1"):
        SampleShape(length=0, extra=1, pad=-1, eod=0)
    with pytest.raises(ArgumentError, match="dtype must be the code of an integer type, found 7"):
        sources.place_stretches(0, first_file=0, num_files=1, dtype=7, num_samples=1, origin_byte=0)
    with pytest.raises(ArgumentError, match="files must be at least one of 1"):
        sources.place_stretches(0, first_file=1, num_files=1, dtype=8, num_samples=1, origin_byte=0)
    with pytest.raises(ArgumentError, match=r"rows must have the shape \[2, 2\]"):
        small(rows=((0, 0),))


def large():
    """A dataset for which a batch of 64 samples uses several threads."""
    rng = np.random.default_rng(0)
    sources = SampleSources(1)
    files, mapped = add_files(sources, [[1 << 18]], np.uint16, rng)
    map_all(sources, files, mapped)
    sources.place_stretches(0, num_samples=127, origin_byte=0, **files)
    return sources, SampleShape(length=2048, extra=1, pad=-1, eod=EOD)


def checksum(sources, shape, seed):
    positions = np.random.default_rng(seed).integers(0, 127, 64)
    batch = arrays(64, 2048, mask=False, borders=False)
    assert gather(sources, np.zeros(64, np.int32), positions, batch, shape, num_threads=4).is_whole
    return int(batch.arrays["tokens"].sum()), int(batch.arrays["labels"].sum())


def test_several_threads_may_gather_at_once():
    sources, shape = large()
    wanted = [checksum(sources, shape, seed) for seed in range(20)]
    found = {}

    def work(first):
        for seed in range(first, 20, 4):
            found[seed] = checksum(sources, shape, seed)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in range(20)] == wanted


def test_a_forked_child_gathers_on_threads_of_its_own():
    sources, shape = large()
    wanted = checksum(sources, shape, 1)
    assert run_in_fork(lambda: checksum(sources, shape, 1)) == wanted
    assert checksum(sources, shape, 1) == wanted
