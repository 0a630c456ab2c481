"""Indexed files put together byte by byte, with no help from the code under test."""

import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


@dataclass
class Pair:
    """What a `.bin` and an `.idx` say. What is None follows from the rest; anything may be set to a lie."""

    prefix: Path
    lengths: list[int]
    borders: list[int]
    tokens: list[float]
    dtype: str = "int32"
    pointers: list[int] | None = None
    modes: list[int] | None = None
    magic: bytes = b"MMIDIDX\x00\x00"
    version: int = 1
    code: int | None = None
    sequence_count: int | None = None
    document_count: int | None = None
    trailing: bytes = field(default=b"")

    @property
    def bin(self) -> Path:
        return Path(f"{self.prefix}.bin")

    @property
    def idx(self) -> Path:
        return Path(f"{self.prefix}.idx")

    @property
    def seal(self) -> Path:
        return Path(f"{self.prefix}.trackbed.json")

    def encode(self) -> bytes:
        """The bytes of the `.idx`."""
        item_bytes = np.dtype(self.dtype).itemsize
        pointers = self.pointers
        if pointers is None:
            pointers = [sum(self.lengths[:i]) * item_bytes for i in range(len(self.lengths))]
        raw = self.magic + struct.pack("<Q", self.version)
        raw += struct.pack("<B", CODES[self.dtype] if self.code is None else self.code)
        raw += struct.pack("<Q", len(self.lengths) if self.sequence_count is None else self.sequence_count)
        raw += struct.pack("<Q", len(self.borders) if self.document_count is None else self.document_count)
        raw += struct.pack(f"<{len(self.lengths)}i", *self.lengths)
        raw += struct.pack(f"<{len(pointers)}q", *pointers)
        raw += struct.pack(f"<{len(self.borders)}q", *self.borders)
        if self.modes is not None:
            raw += struct.pack(f"<{len(self.modes)}b", *self.modes)
        return raw + self.trailing

    def write(self) -> "Pair":
        """Write both files, over old ones."""
        self.bin.write_bytes(np.array(self.tokens, dtype=self.dtype).tobytes())
        self.idx.write_bytes(self.encode())
        return self

    def sequences(self) -> list[list[float]]:
        """The tokens of each sequence."""
        ends = np.cumsum([0, *self.lengths]).tolist()
        return [self.tokens[start:stop] for start, stop in pairwise(ends)]
