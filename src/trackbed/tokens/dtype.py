"""Token types of indexed files, and their codes in the header."""

from enum import Enum
from typing import Any

import numpy as np

from trackbed.errors import ArgumentError


class DType(Enum):
    """NumPy types by their code in the `.idx` header (docs/formats/indexed.md)."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: type[np.number[Any]] | np.dtype[Any]) -> int:
        """Code of a NumPy type.

        Raises:
            ArgumentError: an indexed file cannot hold that type.

        >>> DType.code_from_dtype(np.uint16)
        8
        """
        name = "None" if value is None else np.dtype(value).name  # NumPy takes None for float64
        if name not in cls.__members__:
            raise ArgumentError(f"dtype must be one of {', '.join(cls.__members__)}, found {name}")
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type[np.number[Any]]:
        """NumPy type of a code in `[1, 8]`; other codes raise ValueError.

        >>> DType.dtype_from_code(4)
        <class 'numpy.int32'>
        """
        return np.dtype(cls(value).name).type

    @staticmethod
    def size(key: int | type[np.number[Any]]) -> int:
        """Bytes of one token, by code or type.

        Raises:
            ValueError: `key` is neither a code nor a numeric type.

        >>> DType.size(8), DType.size(np.float64)
        (2, 8)
        """
        if isinstance(key, (int, np.integer)):
            return np.dtype(DType.dtype_from_code(int(key))).itemsize
        if isinstance(key, type) and issubclass(key, np.number):
            return np.dtype(key).itemsize
        raise ValueError(f"key must be a dtype code or a NumPy number type, found {key!r}")

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number[Any]]:
        """Narrowest type that Megatron uses for a vocabulary of `cardinality` tokens: uint16 below 65,500.

        >>> DType.optimal_dtype(50257), DType.optimal_dtype(None)
        (<class 'numpy.uint16'>, <class 'numpy.int32'>)
        """
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32
