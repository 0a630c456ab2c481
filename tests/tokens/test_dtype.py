import numpy as np
import pytest

from tests.support.files.indexed_pair import CODES
from trackbed.errors import ArgumentError
from trackbed.tokens import DType


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_each_type_has_its_code(name, code):
    dtype = np.dtype(name)
    assert DType.code_from_dtype(dtype.type) == DType.code_from_dtype(dtype) == code
    assert DType.dtype_from_code(code) is dtype.type
    assert DType[name].value == code


def test_there_are_eight_types():
    assert [dtype.value for dtype in DType] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_sizes_are_known_by_code_and_by_type(name, code):
    dtype = np.dtype(name)
    assert DType.size(code) == DType.size(np.int64(code)) == DType.size(dtype.type) == dtype.itemsize


@pytest.mark.parametrize("dtype", [np.bool_, np.uint32, np.uint64, np.float16, np.complex64, np.str_, object, None])
def test_a_type_that_a_file_cannot_hold_is_refused(dtype):
    with pytest.raises(ArgumentError, match=f"uint8, int8, .*, found .*{np.dtype(dtype).name if dtype else None}"):
        DType.code_from_dtype(dtype)


@pytest.mark.parametrize("code", [0, 9, -1, 255])
def test_a_code_that_there_is_not_is_refused(code):
    with pytest.raises(ValueError, match=str(code)):
        DType.dtype_from_code(code)
    with pytest.raises(ValueError, match=str(code)):
        DType.size(code)


@pytest.mark.parametrize("key", ["int32", None, 4.0, int, np.dtype("int32")])
def test_only_codes_and_number_types_have_a_size(key):
    with pytest.raises(ValueError, match="key must be"):
        DType.size(key)


@pytest.mark.parametrize(
    ("cardinality", "dtype"),
    [(0, np.uint16), (65499, np.uint16), (65500, np.int32), (65536, np.int32), (10**12, np.int32), (None, np.int32)],
)
def test_the_optimal_type_is_uint16_below_65500_tokens(cardinality, dtype):
    assert DType.optimal_dtype(cardinality) is dtype
