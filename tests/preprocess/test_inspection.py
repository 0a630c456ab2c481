import numpy as np
import pytest

from tests.support.files.indexed_pair import Pair
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import FormatError
from trackbed.preprocess import FirstDocument, LengthBin, first_documents, inspect_pair
from trackbed.preprocess.inspection import bit_lengths, texts_of_runs


def write(path, documents, dtype="uint16"):
    """Writes a pair of documents, each a list of sequences, each a list of tokens."""
    sequences = [sequence for document in documents for sequence in document]
    borders = np.cumsum([0, *map(len, documents)]).tolist()
    tokens = [token for sequence in sequences for token in sequence]
    return Pair(path / "out", list(map(len, sequences)), borders, tokens, dtype=dtype).write()


def test_a_pair_is_counted_by_documents_and_not_by_sequences(tmp_path):
    write(tmp_path, [[[1, 2], [3]], [[4]], [], [[5, 6, 7, 8], [9]]])
    found = inspect_pair(str(tmp_path / "out"))
    assert (found.documents, found.sequences, found.tokens, found.dtype) == (4, 5, 9, "uint16")
    assert (found.shortest, found.longest) == (0, 5)
    assert found.histogram == (LengthBin(0, 0, 1), LengthBin(1, 1, 1), LengthBin(2, 3, 1), LengthBin(4, 7, 1))
    assert (found.bin_bytes, found.idx_bytes) == (18, (tmp_path / "out.idx").stat().st_size)


def test_the_histogram_has_no_gaps(tmp_path):
    write(tmp_path, [[[1] * 9], [[1]]])
    assert [one.documents for one in inspect_pair(str(tmp_path / "out")).histogram] == [1, 0, 0, 1]


def test_a_pair_without_documents_has_no_histogram(tmp_path):
    write(tmp_path, [])
    found = inspect_pair(str(tmp_path / "out"))
    assert (found.documents, found.shortest, found.longest, found.histogram) == (0, 0, 0, ())


def test_bit_lengths_are_pythons():
    numbers = [0, 1, 2, 3, 4, 7, 8, 2**31 - 1, 2**31, 2**52]
    assert bit_lengths(np.array(numbers, dtype=np.int64)).tolist() == [number.bit_length() for number in numbers]


def test_the_first_documents_are_read_across_their_sequences_and_no_further(tmp_path):
    write(tmp_path, [[list(b"ab"), list(b"c")], [], [list(b"defg"), list(b"h")], [list(b"i")]])
    found = first_documents(str(tmp_path / "out"), ByteTokenizer(), num_documents=3, max_tokens=4)
    assert found == [
        FirstDocument(3, "abc", whole=True),
        FirstDocument(0, "", whole=True),
        FirstDocument(5, "defg", whole=False),
    ]


def test_fewer_documents_come_back_where_there_are_fewer(tmp_path):
    write(tmp_path, [[list(b"ab")]])
    assert len(first_documents(str(tmp_path / "out"), ByteTokenizer(), num_documents=9, max_tokens=9)) == 1
    assert first_documents(str(tmp_path / "out"), ByteTokenizer(), num_documents=0, max_tokens=9) == []


@pytest.mark.parametrize(("token", "dtype"), [(257, "uint16"), (-1, "int32"), (0.5, "float32")])
def test_tokens_that_the_tokenizer_does_not_have_are_an_error_that_names_one(tmp_path, token, dtype):
    write(tmp_path, [[[1]], [[2, token]]], dtype=dtype)
    wanted = rf"out: tokens must be integers in \[0, 257\) to be this tokenizer's, found {token} in document 1"
    with pytest.raises(FormatError, match=wanted):
        first_documents(str(tmp_path / "out"), ByteTokenizer(), num_documents=2, max_tokens=9)


def test_runs_have_the_text_that_they_have_in_the_whole():
    def spaced(ids):
        """As many tokenizers do, without a space at the beginning."""
        return " ".join("abcdef"[one] for one in ids)

    def as_bytes(ids):
        return bytes(ids).decode(errors="replace")

    assert texts_of_runs([[0], [1, 2], [3]], spaced) == ["a", " b c", " d"]
    assert texts_of_runs([[65, 0xC3], [0xA9], [66]], as_bytes) == ["A", "\u00e9", "B"]
    assert texts_of_runs([[65] * 40, [66] * 40, [67]], as_bytes) == ["A" * 40, "B" * 40, "C"]
    assert texts_of_runs([], as_bytes) == []
