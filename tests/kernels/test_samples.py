import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import count_tokens, cut_pairs, pair_lengths, reference, sample_index

LENGTHS = np.array([3, 0, 4], dtype=np.int32)
VISITS = np.array([0, 2], dtype=np.int32)
TYPES = [(np.int32, np.int32), (np.int32, np.int64), (np.int64, np.int64), (np.int64, np.int32)]


@st.composite
def streams(draw):
    """Lengths of documents, many of them empty, and visits to them."""
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(0, 9)), min_size=1, max_size=6))
    visits = draw(st.lists(st.integers(0, len(lengths) - 1), max_size=12))
    return np.array(lengths, dtype=np.int32), np.array(visits, dtype=np.int64)


def rows_of(lengths, visits, num_samples, *, row_type=np.int64, **settings):
    rows = np.full((num_samples + 1, 2), -7, dtype=row_type)
    sample_index(lengths, visits, rows, **settings)
    return rows


@pytest.mark.parametrize(("visit_type", "row_type"), TYPES)
@given(
    stream=streams(),
    num_samples=st.integers(0, 20),
    sequence_length=st.integers(1, 7),
    extra_token=st.integers(0, 1),
)
def test_sample_index_equals_its_reference(
    level, visit_type, row_type, stream, num_samples, sequence_length, extra_token
):
    lengths, visits = stream
    settings = {"sequence_length": sequence_length, "extra_token": extra_token}
    rows = rows_of(lengths, visits.astype(visit_type), num_samples, row_type=row_type, **settings)
    assert rows.dtype == row_type
    assert rows.tolist() == reference.sample_index(lengths, visits, num_samples, **settings).tolist()


INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), INT32), max_size=20), st.integers(1, 3), st.integers(0, 5))
def test_pairs_keep_every_bit_of_documents_and_lengths(numbers, num_epochs, offset):
    documents, lengths = np.array(numbers, dtype=np.int32).reshape(-1, 2).T
    raw = np.frombuffer(b"x" * offset + lengths.tobytes(), dtype=np.uint8)[offset:].view(np.int32)
    pairs = np.zeros(num_epochs * len(numbers), np.uint64)
    pair_lengths(documents, raw, pairs)
    assert pairs.tolist() == reference.pair_lengths(documents, lengths, num_epochs).tolist()


@given(
    stream=streams(),
    num_samples=st.integers(0, 20),
    sequence_length=st.integers(1, 7),
    extra_token=st.integers(0, 1),
    num_threads=st.integers(1, 3),
)
def test_cut_pairs_equals_its_reference_and_sample_index(
    stream, num_samples, sequence_length, extra_token, num_threads
):
    lengths, visits = stream
    settings = {"sequence_length": sequence_length, "extra_token": extra_token}
    pairs = np.zeros(len(visits), np.uint64)
    pair_lengths(visits, lengths[visits], pairs)
    documents, rows = np.full(len(visits), -7, np.int32), np.full((num_samples + 1, 2), -7, np.int32)
    cut_pairs(pairs, documents, rows, **settings, num_threads=num_threads)
    wanted = reference.cut_pairs(pairs, num_samples, **settings)
    assert (documents.tolist(), rows.tolist()) == (wanted[0].tolist(), wanted[1].tolist())
    assert documents.tolist() == visits.tolist()
    assert rows.tolist() == rows_of(lengths, visits, num_samples, **settings).tolist()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((VISITS, LENGTHS, np.zeros(2, np.uint64)), "pairs must be a multiple .*found 2, 2 and 3"),
        ((VISITS, LENGTHS[:2], np.zeros(3, np.uint64)), "pairs must be a multiple .*found 3, 2 and 2"),
        ((VISITS[:0], LENGTHS[:0], np.zeros(1, np.uint64)), "pairs must be a multiple .*found 1, 0 and 0"),
        ((VISITS, LENGTHS[:2], np.zeros(2, np.int64)), "pairs .*int64"),
        ((np.array([0, 2**31]), LENGTHS[:2], np.zeros(2, np.uint64)), r"documents .*documents\[1\] = 2147483648"),
        ((VISITS, np.array([1, 2**32 + 3]), np.zeros(2, np.uint64)), r"lengths .*lengths\[1\] = 4294967299"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(arguments, found):
    with pytest.raises(ArgumentError, match=found):
        pair_lengths(*arguments)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"pairs": np.array([0, 2**64 - 2**32], np.uint64)}, r"lengths .*found lengths\[1\] = -1"),
        ({"pairs": np.zeros(3, np.uint64)}, r"visits must have the shape of pairs, \[3\], found \[2\]"),
        ({"visits": np.zeros(2, np.int64)}, "visits .*int64"),
        ({"rows": np.zeros((3, 2), np.int64)}, "rows .*int64"),
        ({"sequence_length": 0}, "sequence_length .*found 0 and 1"),
    ],
)
def test_cut_pairs_refuses_bad_arguments(changes, found):
    arguments = {
        "pairs": np.array([4 << 32, 4 << 32], np.uint64),
        "visits": VISITS.copy(),
        "rows": np.zeros((3, 2), np.int32),
        "sequence_length": 3,
        "extra_token": 1,
        **changes,
    }
    with pytest.raises(ArgumentError, match=found):
        cut_pairs(**arguments)


@given(stream=streams(), sequence_length=st.integers(1, 7), extra_token=st.integers(0, 1))
def test_consecutive_starts_are_one_sequence_apart(stream, sequence_length, extra_token):
    lengths, visits = stream
    total = int(lengths[visits].sum())
    num_samples = max(total - extra_token, 0) // sequence_length
    rows = rows_of(lengths, visits, num_samples, sequence_length=sequence_length, extra_token=extra_token)
    before = np.concatenate([[0], np.cumsum(lengths[visits], dtype=np.int64)])
    assert (before[rows[:, 0]] + rows[:, 1]).tolist() == [k * sequence_length for k in range(num_samples + 1)]


@given(stream=streams(), sequence_length=st.integers(1, 7))
def test_with_the_extra_token_every_row_but_the_first_lies_on_a_token(stream, sequence_length):
    lengths, visits = stream
    if lengths[visits].sum() == 0:
        return
    rows = rows_of(lengths, visits, 30, sequence_length=sequence_length, extra_token=1)[1:]
    assert (rows[:, 1] < lengths[visits[rows[:, 0]]]).all()
    assert (rows >= 0).all()


# The stream is a a a b b b b, in visits 0 and 2; visits 1 and 3 are empty.
@pytest.mark.parametrize(
    ("extra_token", "wanted"),
    [(1, [[0, 0], [2, 0], [2, 3], [2, 3], [2, 3]]), (0, [[0, 0], [0, 3], [2, 3], [3, 0], [3, 0]])],
)
def test_rows_past_the_end_repeat_the_end_of_the_stream(extra_token, wanted):
    visits = np.array([0, 1, 2, 1], dtype=np.int32)
    rows = rows_of(LENGTHS, visits, 4, sequence_length=3, extra_token=extra_token)
    assert rows.tolist() == wanted


@pytest.mark.parametrize("extra_token", [0, 1])
@pytest.mark.parametrize("visits", [[], [1], [1, 1]])
def test_a_stream_without_tokens_has_rows_of_offset_zero(visits, extra_token):
    rows = rows_of(LENGTHS, np.array(visits, dtype=np.int32), 2, sequence_length=3, extra_token=extra_token)
    assert rows[:, 1].tolist() == [0, 0, 0]


def test_token_positions_are_counted_in_64_bits():
    lengths = np.array([2**31 - 1, 2**31 - 1], dtype=np.int32)
    visits = np.array([0, 1, 0], dtype=np.int32)
    rows = rows_of(lengths, visits, 3, row_type=np.int32, sequence_length=2_000_000_000, extra_token=1)
    assert rows.tolist() == [[0, 0], [0, 2_000_000_000], [1, 1_852_516_353], [2, 1_705_032_706]]


def unaligned(array):
    raw = np.frombuffer(b"\x00" + array.tobytes(), dtype=array.dtype, offset=1)
    assert not raw.flags.aligned
    return raw


def test_unaligned_lengths_as_in_an_index_file_are_accepted():
    visits = np.array([0, 2, 1, 0], dtype=np.int64)
    settings = {"sequence_length": 3, "extra_token": 1}
    wanted = rows_of(LENGTHS, visits, 3, **settings).tolist()
    strided = np.array([3, 9, 0, 9, 4, 9], dtype=np.int32)[::2]
    for lengths in (unaligned(LENGTHS), strided, LENGTHS.astype(np.int64), LENGTHS.astype(np.uint8)):
        assert rows_of(lengths, visits, 3, **settings).tolist() == wanted
    for others in (unaligned(visits), visits.astype(np.uint32), visits.astype(np.uint8)):
        for row_type in (np.int32, np.int64):
            assert rows_of(LENGTHS, others, 3, row_type=row_type, **settings).tolist() == wanted


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sequence_length": 0}, "sequence_length .*found 0 and 1"),
        ({"sequence_length": -5}, "sequence_length .*found -5 and 1"),
        ({"extra_token": 2}, "extra_token .*found 3 and 2"),
        ({"extra_token": -1}, "extra_token .*found 3 and -1"),
        # The next two would wrap around 63 bits and place a sample inside the first document.
        ({"sequence_length": 2**63 - 1}, f"sequence_length .*found {2**63 - 1}"),
        ({"sequence_length": 2**62}, f"sequence_length .*found {2**62}"),
        ({"lengths": np.array([3, 0, -1], dtype=np.int32)}, r"lengths .*lengths\[2\] = -1"),
        # Without a check of the value, 2**32 + 3 would be stored as 3.
        ({"lengths": np.array([3, 0, 2**32 + 3])}, r"lengths .*lengths\[2\] = " + str(2**32 + 3)),
        ({"lengths": np.array([1.5, 0, 4])}, "lengths .*float64"),
        ({"lengths": LENGTHS.reshape(1, 3)}, r"lengths .*\[1, 3\]"),
        ({"visits": np.array([0, 3])}, r"visits .*\[0, 2\], found visits\[1\] = 3"),
        ({"visits": np.array([0, -1])}, r"visits .*visits\[1\] = -1"),
        ({"visits": np.array([0, 2**32])}, f"visits .*{2**32}"),
        ({"visits": np.array([0.0, 1.5])}, "visits .*float64"),
        ({"visits": VISITS.reshape(1, 2)}, r"visits .*\[1, 2\]"),
        ({"lengths": LENGTHS[:0]}, r"visits .*visits\[0\] = 0"),
        ({"rows": np.zeros(4, np.int32)}, r"rows .*\[4\]"),
        ({"rows": np.zeros((0, 2), np.int32)}, r"rows .*\[0, 2\]"),
        ({"rows": np.zeros((2, 3), np.int32)}, r"rows .*\[2, 3\]"),
        # If an output is not written in place, a copy is filled and the result lost.
        ({"rows": np.zeros((2, 2), np.int16)}, "rows .*int16"),
        ({"rows": np.zeros((2, 2), np.uint32)}, "rows .*uint32"),
        ({"rows": np.zeros((2, 2), np.float64)}, "rows .*float64"),
        ({"rows": np.zeros((4, 2), np.int32)[::2]}, r"rows .*\(16, 4\)"),
        ({"rows": np.zeros((2, 2), np.int32).T}, r"rows .*\(4, 8\)"),
        ({"rows": np.broadcast_to(np.zeros(2, np.int32), (2, 2))}, r"rows .*\(0, 4\)"),
    ],
)
def test_bad_arguments_are_refused(changes, found):
    arguments = {
        "lengths": LENGTHS,
        "visits": VISITS,
        "rows": np.zeros((3, 2), np.int32),
        "sequence_length": 3,
        "extra_token": 1,
        **changes,
    }
    with pytest.raises(ArgumentError, match=found):
        sample_index(**arguments)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_a_poll_that_raises_ends_all_threads(num_threads):
    lengths, visits = np.full(1000, 3, np.int32), np.arange(30_000_000, dtype=np.int32) % 1000

    def poll(done):
        raise InterruptedError(done)

    rows = np.zeros((5_600_000, 2), np.int32)
    options = {"sequence_length": 16, "extra_token": 1, "num_threads": num_threads, "poll": poll}
    for _ in range(3):
        with pytest.raises(InterruptedError):
            sample_index(lengths, visits, rows, **options)
    with pytest.raises(InterruptedError):
        cut_pairs(np.full(30_000_000, 3 << 32, np.uint64), visits, rows, **options)
    with pytest.raises(InterruptedError):
        pair_lengths(visits, visits, np.zeros(60_000_000, np.uint64), poll=poll)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=100), st.integers(0, 7), st.integers(1, 2))
def test_tokens_are_counted_at_any_address(lengths, offset, step):
    raw = b"x" * offset + np.array(lengths, dtype=np.int32).tobytes()
    found = np.frombuffer(raw, dtype=np.uint8)[offset:].view(np.int32)[::step]
    assert count_tokens(found) == reference.count_tokens(found)


@pytest.mark.parametrize("lengths", [np.zeros(3, np.int64), np.zeros((2, 2), np.int32)])
def test_only_vectors_of_lengths_are_counted(lengths):
    with pytest.raises(ArgumentError, match="lengths must be a vector of int32"):
        count_tokens(lengths)
