import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.files import CHUNK_BYTES, Checksum, checksum_file


def crc32_of_chunks(data):
    view = memoryview(data)
    return [f"{zlib.crc32(view[at : at + CHUNK_BYTES]):08x}" for at in range(0, len(view), CHUNK_BYTES)]


def test_chunks_have_64_mib():
    assert CHUNK_BYTES == 67108864


@given(pieces=st.lists(st.binary(max_size=50)))
def test_pieces_of_any_size_sum_up_to_the_checksum_of_the_whole(pieces):
    checksum = Checksum()
    for piece in pieces:
        checksum.update(piece)
    whole = b"".join(pieces)
    assert checksum.size_bytes == len(whole)
    assert checksum.chunks() == crc32_of_chunks(whole)


def test_the_checksum_is_the_usual_one():
    checksum = Checksum()
    checksum.update(b"123456789")
    assert checksum.chunks() == ["cbf43926"]


def test_a_small_checksum_keeps_its_leading_zeros():
    data = next(str(n).encode() for n in range(10_000) if zlib.crc32(str(n).encode()) < 1 << 24)
    checksum = Checksum()
    checksum.update(data)
    assert checksum.chunks() == [f"00{zlib.crc32(data):06x}"]


# Pieces that end just before, at and after the end of a chunk, and one that spans two ends.
@pytest.mark.parametrize(
    "cuts",
    [
        [CHUNK_BYTES - 1, CHUNK_BYTES + 1],
        [CHUNK_BYTES],
        [5, CHUNK_BYTES - 5, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 1],
        [CHUNK_BYTES - 3],
    ],
)
def test_a_chunk_ends_at_its_64th_mib_for_any_pieces(cuts):
    data = np.random.default_rng(1).bytes(2 * CHUNK_BYTES + 7)
    checksum = Checksum()
    for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
        checksum.update(memoryview(data)[start:stop])
    assert checksum.size_bytes == len(data)
    assert checksum.chunks() == crc32_of_chunks(data)
    assert len(checksum.chunks()) == 3


def test_a_whole_chunk_is_followed_by_no_empty_one():
    checksum = Checksum()
    checksum.update(bytes(CHUNK_BYTES))
    assert checksum.chunks() == crc32_of_chunks(bytes(CHUNK_BYTES))


def test_chunks_can_be_read_before_the_end():
    checksum = Checksum()
    checksum.update(b"ab")
    checksum.chunks()
    checksum.update(b"c")
    assert checksum.chunks() == crc32_of_chunks(b"abc")


def test_empty_data_has_no_chunks():
    checksum = Checksum()
    checksum.update(b"")
    assert checksum.chunks() == []
    assert checksum.size_bytes == 0


def test_wider_items_count_by_their_bytes():
    checksum = Checksum()
    checksum.update(np.arange(3, dtype=np.int64).data)
    checksum.update(bytearray(b"xy"))
    assert checksum.size_bytes == 26
    assert checksum.chunks() == crc32_of_chunks(np.arange(3, dtype=np.int64).tobytes() + b"xy")


def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path):
    data = np.random.default_rng(2).bytes(CHUNK_BYTES + 3)
    (tmp_path / "data").write_bytes(data)
    seen = []
    checksum = checksum_file(tmp_path / "data", progress=seen.append)
    assert checksum.chunks() == crc32_of_chunks(data)
    assert checksum.size_bytes == sum(seen) == len(data)
    assert len(seen) > 1


def test_an_empty_file_has_no_chunks(tmp_path):
    (tmp_path / "data").touch()
    assert checksum_file(tmp_path / "data").chunks() == []
