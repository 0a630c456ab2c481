"""Records and files of a checkpoint, against torch and Python's own modules."""

import errno
import io
import mmap
import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from trackbed.checkpoint import ShardedTensor, load, save
from trackbed.checkpoint.format.torch_record import tensor_record
from trackbed.checkpoint.io.boxes import slabs_of
from trackbed.checkpoint.io.file_reader import open_reader
from trackbed.checkpoint.io.file_writer import FileWriter, bytes_of, write_items
from trackbed.errors import CheckpointError

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (0,), (5,), (3, 4), (2, 1, 3), (2, 0, 3)]
MIB = 1 << 20


def some(dtype, shape):
    """A tensor of any bytes that are valid for its type."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.uint8) % (2 if dtype == torch.bool else 120)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("start", [64, 4096])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_record_is_read_by_torch_and_zipfile(dtype, shape, start):
    tensor = some(dtype, shape)
    record = tensor_record(dtype, shape, payload_start=start)
    payload = bytes_of(tensor).tobytes()
    content = record.head + payload + record.tail(zlib.crc32(payload))
    assert (len(record.head), record.payload_bytes, record.num_bytes) == (start, len(payload), len(content))
    found = torch.load(io.BytesIO(content), weights_only=True)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert np.array_equal(bytes_of(found), bytes_of(tensor))
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None


def test_a_record_of_more_than_4_gib_names_its_sizes_in_64_bits(tmp_path):
    size = (4 << 30) + 8
    record = tensor_record(torch.uint8, (size,))
    path = tmp_path / "record"
    with path.open("wb") as file:  # a sparse file: the payload is zeros
        file.write(record.head)
        file.seek(size, 1)
        file.write(record.tail(0x12345678))
    assert path.stat().st_size == record.num_bytes
    with zipfile.ZipFile(path) as archive:
        (payload,) = [member for member in archive.infolist() if member.filename == "archive/data/0"]
        assert (payload.file_size, payload.CRC) == (size, 0x12345678)
        assert archive.read("archive/version") == b"3\n"
    found = torch.load(path, mmap=True, weights_only=True)
    assert found.shape == (size,)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 8 * MIB, 8 * MIB + 1, 33 * MIB + 5])
def test_a_file_has_its_bytes_and_checksums(tmp_path, count, direct):
    payload = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    path = tmp_path / "file"
    with FileWriter(path, direct=direct) as file:
        file.write(b"head")
        file.align()
        whole, sums = file.write_payload([payload])
        file.write(b"tail")
        file.finish()
    content = path.read_bytes()
    assert content[: 4 + len(payload)][:4] == b"head"
    assert content[4096:] == payload.tobytes() + b"tail"
    assert (file.position, file.crc) == (len(content), zlib.crc32(content))
    assert whole == zlib.crc32(payload.tobytes())
    assert sums == [zlib.crc32(payload[start : start + MIB].tobytes()) for start in range(0, count, MIB)]


def page_aligned(array, offset):
    """A copy of an array that begins some bytes behind the beginning of a page."""
    memory = np.frombuffer(mmap.mmap(-1, max(1, len(array)) + 8192), dtype=np.uint8)
    copy = memory[offset : offset + len(array)]
    copy[:] = array
    return copy


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_payloads_are_written_from_where_they_lie(tmp_path, seed, direct):
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 3, 4096, MIB - 1, MIB, MIB + 1, 3 * MIB + 77, 9 * MIB, 17 * MIB + 4095], 8).tolist()
    parts, expected, checks = [], b"", []
    path = tmp_path / "file"
    with FileWriter(path, direct=direct, in_place=True) as file:
        for size in sizes:
            payload = page_aligned(rng.integers(0, 256, size, dtype=np.uint8), int(rng.choice([0, 0, 64, 4096])))
            parts.append(payload)
            file.write(b"head")
            if rng.integers(2):
                file.align()
            expected += b"head"
            expected += bytes(file.position - len(expected))
            checks.append((payload, *file.write_payload([payload])))
            expected += payload.tobytes()
        file.write(b"tail")
        file.finish()
    assert path.read_bytes() == expected + b"tail"
    assert file.crc == zlib.crc32(expected + b"tail")
    for payload, whole, sums in checks:
        assert whole == zlib.crc32(payload.tobytes())
        assert sums == [zlib.crc32(payload[start : start + MIB].tobytes()) for start in range(0, len(payload), MIB)]


def num_open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def refuse_direct(monkeypatch, error):
    """Has the system refuse to open files past the page cache."""

    def refuse(path, flags, *mode, open_=os.open, **options):
        if flags & os.O_DIRECT:
            raise OSError(error, os.strerror(error), str(path))
        return open_(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_direct_writes_gets_the_same_bytes(error, tmp_path, monkeypatch):
    items = [torch.arange(3_000_000.0), b"object", torch.arange(5)]
    wanted = write_items(tmp_path / "wanted", items)
    refuse_direct(monkeypatch, error)
    assert write_items(tmp_path / "found", items) == wanted
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")
def test_other_refusals_are_errors_and_leave_no_file_open(tmp_path, monkeypatch):
    refuse_direct(monkeypatch, errno.EACCES)
    before = num_open_files()
    with pytest.raises(PermissionError, match=r"'.*/file'"):
        write_items(tmp_path / "file", [torch.zeros(3)])
    assert num_open_files() == before


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no file system in memory")
def test_a_checkpoint_in_memory_is_saved_and_loaded():
    """Some versions of the system refuse direct writes there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        entry = ShardedTensor.from_rank_offsets("w", torch.arange(300_000.0))
        save({"w": entry}, Path(folder, "checkpoint"))
        assert torch.equal(load({"w": entry.without_data()}, Path(folder, "checkpoint"))["w"], entry.data)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OSError, match=r"No such file or directory.*'.*missing/file'"):
        write_items(tmp_path / "missing" / "file", [torch.zeros(3)])
    with pytest.raises(OSError, match=r"No space left on device.*'/dev/full'"):
        write_to_full_disk()


def write_to_full_disk():
    """Writes to a device that exists and is full."""
    create = mock.patch(
        "trackbed.checkpoint.io.file_writer._create", lambda path, direct: (os.open(path, os.O_WRONLY), False)
    )
    with create, FileWriter("/dev/full") as file:
        file.write_payload([np.zeros(3, dtype=np.uint8)])
        file.finish()


def test_each_range_of_a_payload_is_read_and_verified(tmp_path):
    payload = np.random.default_rng(1).integers(0, 256, 3 * MIB + 1000, dtype=np.uint8)
    (item,) = write_items(tmp_path / "file", [torch.from_numpy(payload)]).items
    sums = np.array(item.sums, dtype=np.uint32)
    ranges = [
        (0, len(payload)),
        (5, 10),
        (MIB - 1, MIB + 1),
        (MIB, 2 * MIB),
        (1, 3 * MIB + 999),
        (3 * MIB, len(payload)),
        (7, 7),
    ]
    with open_reader(tmp_path, "file") as reader:
        for low, high in ranges:
            target = np.zeros(high - low, dtype=np.uint8)
            reader.read_payload(target, item.payload_start, len(payload), low, sums, "w")
            assert np.array_equal(target, payload[low:high])
    content = bytearray((tmp_path / "file").read_bytes())
    content[item.payload_start + MIB + 3] ^= 1
    (tmp_path / "file").write_bytes(content)
    with open_reader(tmp_path, "file") as reader:
        for low, high in ranges:
            target = np.zeros(high - low, dtype=np.uint8)
            if high <= MIB or low >= 2 * MIB or low == high:
                reader.read_payload(target, item.payload_start, len(payload), low, sums, "w")
                continue
            place = item.payload_start + MIB
            words = (
                rf"^file: w: the checksum of the MiB at byte {place:,} must be \w+, as trackbed\.extents says, but is"
            )
            with pytest.raises(CheckpointError, match=words):
                reader.read_payload(target, item.payload_start, len(payload), low, sums, "w")


def test_a_file_that_ends_too_early_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    with (
        open_reader(tmp_path, "file") as reader,
        pytest.raises(CheckpointError, match=r"^file: w must end at byte 6, but the file ends at 3"),
    ):
        reader.read_into(np.zeros(4, dtype=np.uint8), 2, "w")
    with (
        pytest.raises(CheckpointError, match=r"^other: must be in .*, but cannot be opened: No such file"),
        open_reader(tmp_path, "other"),
    ):
        pass


@pytest.mark.parametrize("element_bytes", [1, 4 << 10, 1 << 20, 8 << 20])
def test_slabs_cover_a_part_and_little_else(element_bytes):
    rng = np.random.default_rng(element_bytes)
    for _ in range(200):
        shape = tuple(rng.integers(1, 6, rng.integers(1, 5)).tolist())
        first = tuple(int(rng.integers(0, size)) for size in shape)
        end = tuple(int(rng.integers(low + 1, size + 1)) for low, size in zip(first, shape, strict=True))
        wanted = np.zeros(shape, dtype=int)
        wanted[tuple(map(slice, first, end))] = 1
        seen = np.zeros(shape, dtype=int)
        for slab in slabs_of(shape, first, end, element_bytes):
            axis = len(slab.index)
            flat = np.zeros(seen.size, dtype=int)
            flat[slab.start : slab.start + slab.num_elements] = 1
            box = np.zeros(shape, dtype=int)
            box[(*slab.index, slice(slab.low, slab.high))] = 1
            assert np.array_equal(flat.reshape(shape), box)
            assert slab.is_whole(shape, first, end) == (box[tuple(wanted.nonzero())].sum() == slab.num_elements), axis
            seen += box
        assert (seen >= wanted).all()
        assert seen.max() == 1


@pytest.mark.parametrize("large", [torch.zeros(16 << 10), bytes(64 << 10)])
def test_items_from_64_kib_on_begin_at_pages(large, tmp_path):
    small = bytes(100)
    items = write_items(tmp_path / "file", [small, large, small, large, bytes((64 << 10) - 1)]).items
    assert [item.start for item in items[:2]] == [0, 4096]
    assert items[3].start % 4096 == 0
    assert items[2].start == items[1].start + items[1].num_bytes
    assert items[4].start == items[3].start + items[3].num_bytes
