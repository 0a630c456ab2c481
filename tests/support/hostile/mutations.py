"""Damage to files: other bytes, other numbers, other JSON, and things that are no regular files.

Each function takes a `random.Random`, so that a seed tells what was done.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

U64 = [0, 1, 2, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
I32 = [0, 1, -1, 2**31 - 1, -(2**31), 7, -100]
ODD_JSON = [
    *(None, True, -1, 0, 1, 0.5, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**70, 10**400, -(2**63), 1e308),
    *("", "x", "\x00", "../../../../etc/passwd", "/dev/zero", "\ud7ff", "9" * 5000, "<i8", "|O", "0" * 8),
    *([], [[]], [None], [1] * 1000, [-1, 2], [2**62, 2**62], [0, 0], {}, {"a": 1}, {"dtype": "<i4", "shape": [1]}),
]
ODD_TEXT = [
    b"NaN",
    b"Infinity",
    b"-0",
    b"1e99999",
    b'"\xff\xfe"',
    b'"\\ud800"',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\x00",
]
ODD_HEADERS = [
    *(("<i4", "<i8"), ("<i4", "<u4"), ("<i4", "|O4"), ("<u4", "<f4"), ("<i", ">i"), ("False", "True")),
    *(("(", "(2, "), (",), ", ", 9),"), ("'shape': (", "'shape': (9"), ("'shape': (", "'shape': (-"), ("{", "[")),
    *(("\n", " "), ("\x01\x00", "\x02\x00"), ("descr", "shape"), ("(", "(9999999999999999999, ")),
]


def change_bytes(draw: Random, raw: bytes) -> bytes:
    """Cut, extended, zeroed, flipped, moved or replaced bytes."""
    found = bytearray(raw)
    for _ in range(draw.choice([1, 1, 1, 2, 5, 30])):
        size = len(found)
        at = draw.randrange(size + 1)
        stop = min(size, at + draw.choice([1, 4, 8, 64, 4096]))
        kind = draw.choice(["cut", "extend", "zero", "bit", "byte", "swap", "insert", "remove", "random"])
        if kind == "cut":
            del found[at:]
        elif kind == "extend":
            found += draw.choice([b"\x00", b"x", bytes(8), bytes(4096), found[:100]])
        elif kind == "zero":
            found[at:stop] = bytes(stop - at)
        elif kind == "insert":
            found[at:at] = draw.randbytes(draw.randrange(1, 20))
        elif kind == "remove":
            del found[at:stop]
        elif kind == "random":
            found[at:stop] = draw.randbytes(stop - at)
        elif at < size and kind == "bit":
            found[at] ^= 1 << draw.randrange(8)
        elif at < size and kind == "byte":
            found[at] = draw.randrange(256)
        elif size >= 16:
            other = draw.randrange(size - 8)
            at = min(at, size - 8)
            found[at : at + 8], found[other : other + 8] = found[other : other + 8], found[at : at + 8]
    return bytes(found)


def change_index(draw: Random, raw: bytes) -> bytes:
    """Other fields of an `.idx`."""
    if draw.random() < 0.25 or len(raw) < 34:
        return change_bytes(draw, raw)
    found = bytearray(raw)
    num_sequences, num_borders = struct.unpack_from("<QQ", raw, 18)
    lengths, pointers = 34, 34 + 4 * num_sequences
    borders = pointers + 8 * num_sequences
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        kind = draw.choice(["code", "count", "length", "length", "lengths", "pointer", "pointer", "pointers", "border"])
        one, other = draw.randrange(num_sequences), draw.randrange(num_sequences)
        if kind == "code":
            found[17] = draw.choice([0, 1, 2, 3, 4, 5, 6, 7, 9, 255])
        elif kind == "count":
            value = draw.choice([*U64, num_sequences + 1, num_sequences - 1, num_borders - 1, num_borders + 8])
            struct.pack_into("<Q", found, draw.choice([9, 18, 26]), value)
        elif kind == "length":
            (old,) = struct.unpack_from("<i", raw, lengths + 4 * one)
            struct.pack_into("<i", found, lengths + 4 * one, draw.choice([*I32, old + 1, max(-1, old - 1)]))
        elif kind == "pointer":
            (old,) = struct.unpack_from("<Q", raw, pointers + 8 * one)
            value = draw.choice([*U64, old + 1, old + 2, max(0, old - 2), draw.randrange(4000)])
            struct.pack_into("<Q", found, pointers + 8 * one, value)
        elif kind == "border":
            value = draw.choice([*U64, draw.randrange(num_sequences + 2)])
            struct.pack_into("<Q", found, borders + 8 * draw.randrange(num_borders), value)
        else:
            first, size = (lengths, 4) if kind == "lengths" else (pointers, 8)
            here, there = (slice(first + size * n, first + size * (n + 1)) for n in (one, other))
            found[here], found[there] = found[there], found[here]
    if draw.random() < 0.2:
        found += bytes(num_sequences)  # modes
    return bytes(found)


def change_npy(draw: Random, raw: bytes) -> bytes:
    """Other numbers, or another header, of a `.npy`."""
    kind = draw.choice(["bytes", "header", "number", "number", "number", "order"])
    if kind == "bytes" or len(raw) <= 136:
        return change_bytes(draw, raw)
    found = bytearray(raw)
    if kind == "number":
        size = draw.choice([2, 4, 8])
        for _ in range(draw.choice([1, 1, 3])):
            at = 128 + size * draw.randrange((len(raw) - 128) // size)
            old = int.from_bytes(raw[at : at + size], "little")
            value = draw.choice([old + 1, old - 1, old ^ 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2**30, 0])
            found[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    elif kind == "order":
        found[128:] = b"".join(
            draw.sample([raw[at : at + 8] for at in range(128, len(raw), 8)], -(-(len(raw) - 128) // 8))
        )
    else:
        header = raw[:128].decode("latin-1")
        old, new = draw.choice(ODD_HEADERS)
        found[:128] = header.replace(old, new, 1).encode("latin-1")[:128].ljust(128)
    return bytes(found)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in some JSON."""
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return []
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def change_value(draw: Random, raw: bytes) -> bytes:
    """JSON of which some values are other ones."""
    try:
        found = json.loads(raw)
    except ValueError:
        return change_bytes(draw, raw)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        places = _places(found)
        if not places:
            break
        here, key = draw.choice(places)
        kind = draw.random()
        if kind < 0.15:
            del here[key]
        elif kind < 0.3:
            other, other_key = draw.choice(places)
            here[key] = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict) else other[:1]))
        elif kind < 0.4 and isinstance(here, dict):
            here[draw.choice(["", "x", "format", f"{key}/../x"])] = here.pop(key)
        elif kind < 0.5 and isinstance(here[key], int):
            here[key] += draw.choice([-1, 1, 1 << 40])
        else:
            here[key] = draw.choice(ODD_JSON)
    if draw.random() < 0.05:
        found = draw.choice(ODD_JSON)
    return json.dumps(found).encode("utf-8", "surrogatepass")


def change_json(draw: Random, raw: bytes) -> bytes:
    """JSON with other values, or none any more."""
    kind = draw.random()
    if kind < 0.2:
        return change_bytes(draw, raw)
    if kind < 0.3:
        at = raw.find(b":", draw.randrange(len(raw))) + 1
        return raw[:at] + draw.choice(ODD_TEXT) + b"," + raw[at:].partition(b",")[2]
    if kind < 0.4:
        return raw.replace(b"{", b'{"files": {}, "version": 1, "boot": 7,', 1)  # keys twice
    if kind < 0.45:
        return draw.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"[", b"null\n"]) + raw
    return change_value(draw, raw)


def change_text(draw: Random, raw: bytes) -> bytes:
    """A text of lines with other lines."""
    lines = raw.splitlines()
    draw.shuffle(lines)
    odd = [b"", b"flushed", b"data x", b"\xff", b"\x00" * 99, b"a" * 100_000, b"flushed " + b"0" * 32]
    return draw.choice([change_bytes(draw, raw), b"\n".join([*lines[1:], *draw.choices(odd, k=2)])])


def odd_kinds() -> dict[str, Callable[[Path], object]]:
    """Ways of putting something else in the place of a file, by name."""

    def sparse(path: Path) -> None:
        for power in (62, 43, 40):
            try:
                os.truncate(path, 1 << power)
            except OSError:
                continue
            return

    def make_sparse(path: Path) -> None:
        path.touch()
        sparse(path)

    def folder(path: Path) -> None:
        path.mkdir()
        (path / "file").write_bytes(b"x")

    return {
        "folder": folder,
        "loop": lambda path: path.symlink_to(path.name),
        "dangling link": lambda path: path.symlink_to("nowhere"),
        "pipe": os.mkfifo,
        "nothing": lambda _path: None,
        "empty file": Path.touch,
        "sparse": make_sparse,
        "device": lambda path: path.symlink_to("/dev/zero"),
    }


def replace_by(path: Path, name: str) -> None:
    """Puts something else, of `odd_kinds`, in the place of a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}-away"))
    else:
        path.unlink(missing_ok=True)
    odd_kinds()[name](path)
