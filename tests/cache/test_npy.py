import contextlib
import io
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackbed.cache.npy import encode_npy_header, map_npy
from trackbed.errors import ArgumentError, FormatError


def header_of(array):
    return encode_npy_header(array.dtype, array.shape)


@given(
    st.sampled_from(["i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f4", "<f8", "?"]),
    st.lists(st.integers(0, 2**62), max_size=5).map(tuple),
)
def test_a_header_is_numpys(dtype, shape):
    file = io.BytesIO()
    fields = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    assert encode_npy_header(np.dtype(dtype), shape) == file.getvalue()


@pytest.mark.parametrize("dtype", [">i4", "O", "M8[s]", "S3"])
def test_only_plain_numbers_are_kept(dtype):
    with pytest.raises(ArgumentError, match="plain numbers"):
        encode_npy_header(np.dtype(dtype), (1,))


FUZZ_SECONDS = float(os.environ.get("TRACKBED_FUZZ_SECONDS", "3"))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int64).reshape(3, 2),
        np.arange(5, dtype=np.uint32),
        np.empty((0, 2), dtype=np.int32),
        np.arange(12, dtype=np.int16)[::3],
    ],
)
def test_an_array_comes_back_and_is_what_numpy_saves(tmp_path, array):
    (tmp_path / "ours.npy").write_bytes(header_of(array) + array.tobytes())
    np.save(tmp_path / "numpys.npy", array)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "numpys.npy").read_bytes()
    back = map_npy(tmp_path / "ours.npy")
    assert back.dtype == array.dtype
    assert back.tolist() == array.tolist()


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FormatError, match="must describe plain numbers"):
        map_npy(tmp_path / "x.npy")


def test_an_array_in_fortrans_order_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 2), order="F"))
    with pytest.raises(FormatError, match="C order"):
        map_npy(tmp_path / "x.npy")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_is_not_as_long_as_its_header_says_is_refused_with_both_sizes(tmp_path, change):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(5))
    os.truncate(path, 168 + change)
    with pytest.raises(FormatError, match=rf"makes 168 bytes, found {168 + change}"):
        map_npy(path)


def test_a_header_that_promises_too_much_allocates_nothing(tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(header_of(np.arange(5)).replace(b"(5,), }   ", b"(10000000000,), }")[:128])
    with pytest.raises(FormatError):
        map_npy(path)


@pytest.mark.parametrize("shape", [b"(30 3,)", b"(3,,)", b"(,)", b"(3 ,)", b"(-3,)", b"(3)"])
def test_a_shape_that_is_no_tuple_of_numbers_is_refused(tmp_path, shape):
    path = tmp_path / "x.npy"
    path.write_bytes(header_of(np.arange(5)).replace(b"(5,)", shape))
    with pytest.raises(FormatError, match="must describe plain numbers"):
        map_npy(path)


WHOLE = header_of(np.arange(9).reshape(3, 3)) + np.arange(9).tobytes()
MUTATED = st.builds(
    lambda at, with_: WHOLE[:at] + with_ + WHOLE[at + len(with_) :],
    st.integers(0, len(WHOLE)),
    st.binary(min_size=1, max_size=12),
)


def _fuzz(tmp_path, seconds):
    """Feed bytes to the reader until time is up: arrays or FormatError, nothing else."""
    path = tmp_path / "x.npy"
    deadline = time.monotonic() + seconds
    tried = 0
    while time.monotonic() < deadline:

        @settings(max_examples=500, derandomize=False)
        @given(MUTATED | st.binary(max_size=300) | st.integers(0, len(WHOLE)).map(lambda size: WHOLE[:size]))
        def feed(raw):
            nonlocal tried
            tried += 1
            path.write_bytes(raw)
            with contextlib.suppress(FormatError):
                assert map_npy(path).nbytes <= len(raw)

        feed()
    print(f"{tried} files")


def test_any_bytes_are_an_array_or_a_format_error(tmp_path):
    _fuzz(tmp_path, FUZZ_SECONDS)


@pytest.mark.slow
def test_any_bytes_are_an_array_or_a_format_error_for_minutes(tmp_path):
    _fuzz(tmp_path, 120)
