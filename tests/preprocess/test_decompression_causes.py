"""Each failure of a decompressor is told by its cause."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import FormatError
from trackbed.preprocess import PreprocessConfig, TrainingConfig, preprocess, train_tokenizer
from trackbed.preprocess.known_data import GZIP, ZSTANDARD, begins_as, kind_of

LINES = b'{"text": "hello world"}\n' * 400
GZ = gzip.compress(LINES, mtime=0)  # names of tests must be the same in all workers
ZST = zstandard.ZstdCompressor(write_checksum=True).compress(LINES)


def with_window(log, data=LINES):
    parameters = zstandard.ZstdCompressionParameters(window_log=log, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return packer.compress(data) + packer.flush()


def with_dictionary():
    samples = [b'{"text": "hello world %d"}\n' % (number * 7919) * 9 for number in range(900)]
    dictionary = zstandard.train_dictionary(4096, samples)
    return zstandard.ZstdCompressor(dict_data=dictionary).compress(LINES)


def with_lz4_magic():
    return b"\x04\x22\x4d\x18" + bytes(40)


def run(folder, name, **options):
    config = PreprocessConfig(inputs=(folder / name,), output=str(folder / "out"), **{"workers": 1, **options})
    return preprocess(config, ByteTokenizer())


def error_of(folder, name, raw, **options):
    (folder / name).write_bytes(raw)
    with pytest.raises(FormatError) as caught:
        run(folder, name, **options)
    message = str(caught.value)
    assert message.startswith(f"{folder / name}: ")
    return message.removeprefix(f"{folder / name}: ")


@pytest.mark.parametrize("log", [27, 28, 30, 31])
def test_long_windows_are_read(tmp_path, log):
    (tmp_path / "a.jsonl.zst").write_bytes(with_window(log) + with_window(20))
    assert run(tmp_path, "a.jsonl.zst").records == 800


def test_a_long_window_is_read_of_a_plain_text_and_while_a_tokenizer_is_trained(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(with_window(30))
    assert run(tmp_path, "a.txt.zst").records == 1
    config = TrainingConfig(inputs=(tmp_path / "a.txt.zst",), vocab_size=300)
    assert train_tokenizer(config, tmp_path / "t.json").records == 1


def test_a_window_that_no_library_reads_is_named(tmp_path):
    frame = bytearray(with_window(27))
    frame[5] = 22 << 3  # 2**32 bytes
    message = error_of(tmp_path, "a.jsonl.zst", bytes(frame))
    assert message.startswith("a window must have at most 2 GiB (zstd --long=31), found a frame with a larger one")


def test_a_frame_that_needs_a_dictionary_is_named(tmp_path):
    message = error_of(tmp_path, "a.jsonl.zst", with_dictionary())
    assert message.startswith("a frame must need no dictionary, found one that does: decompress it with zstd -d -D ")


OWN = {".gz": "gzip data", ".zst": "Zstandard data"}
OTHERS = {
    "gzip data": GZ,
    "Zstandard data": ZST,
    "xz data": lzma.compress(LINES),
    "bzip2 data": bz2.compress(LINES),
    "LZ4 data": with_lz4_magic(),
    "plain text": LINES,
    "data of Zstandard before version 0.8": b"\x25\xb5\x2f\xfd" + bytes(20),
    "other data": zlib.compress(LINES),
}


@pytest.mark.parametrize(
    ("end", "found"),
    [
        (end, found)
        for end, own in ((".gz", "gzip data"), (".zst", "Zstandard data"))
        for found in OTHERS
        if found != own
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_data_of_another_kind_are_named(tmp_path, end, found, workers):
    kind = OWN[end]
    message = error_of(tmp_path, f"a.jsonl{end}", OTHERS[found], workers=workers)
    way = f"take {end} off its name" if found == "plain text" else "give it the name that fits, or decompress it"
    assert message == f"a file that ends in {end} must hold {kind}, found {found}: {way}"


def test_archives_and_tables_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.jsonl", LINES)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    assert "found a zip archive" in error_of(tmp_path, "a.jsonl.gz", (tmp_path / "a.zip").read_bytes())
    assert "found a Parquet file" in error_of(tmp_path, "b.jsonl.gz", (tmp_path / "a.parquet").read_bytes())


@pytest.mark.parametrize("text", ["a", "ab\n", "caf\u00e9 " * 30, "\u6771" * 40, "\ttab\r\n"])
def test_short_texts_and_texts_of_other_scripts_are_plain_text(tmp_path, text):
    for end in (".gz", ".zst"):
        assert "found plain text: take" in error_of(tmp_path, f"a.jsonl{end}", text.encode())


CHECKSUMS = {
    "CRC of gzip": (".gz", GZ[:-8] + b"\0\0\0\0" + GZ[-4:]),
    "length of gzip": (".gz", GZ[:-4] + b"\1\1\1\1"),
    "second member": (".gz", GZ + GZ[:-8] + b"\0\0\0\0" + GZ[-4:]),
    "zstd": (".zst", ZST[:-1] + bytes([ZST[-1] ^ 1])),
    "second frame": (".zst", ZST + ZST[:-1] + bytes([ZST[-1] ^ 1])),
}


@pytest.mark.parametrize(("end", "raw"), CHECKSUMS.values(), ids=CHECKSUMS)
def test_a_wrong_checksum_is_named(tmp_path, end, raw):
    message = error_of(tmp_path, f"a.jsonl{end}", raw)
    assert message.startswith("the data must have the checksum that is stored with them, found another before byte")
    assert message.endswith("the file is damaged; copy or download it again")


CUTS = {
    "trailer of gzip": (".gz", GZ[:-5]),
    "data of gzip": (".gz", GZ[:30]),
    "header of gzip": (".gz", GZ[:5]),
    "magic of gzip": (".gz", GZ[:1]),
    "second member": (".gz", GZ + GZ[:30]),
    "zstd": (".zst", ZST[:-5]),
    "magic of zstd": (".zst", ZST[:3]),
    "second frame": (".zst", ZST + ZST[:10]),
}


@pytest.mark.parametrize(("end", "raw"), CUTS.values(), ids=CUTS)
def test_a_file_that_is_cut_short_is_incomplete(tmp_path, end, raw):
    message = error_of(tmp_path, f"a.jsonl{end}", raw)
    assert message.startswith(f"must be a complete {end} file, found at byte {len(raw)}: ")


@pytest.mark.parametrize(("end", "raw"), [(".gz", GZ), (".zst", ZST)], ids=["gz", "zst"])
def test_other_data_after_whole_ones_are_named(tmp_path, end, raw):
    message = error_of(tmp_path, f"a.jsonl{end}", raw + b"<html>not found</html>\n")
    assert "must go on to the end of the file, found other data before byte" in message


def test_zeros_after_gzip_data_and_frames_to_be_skipped_are_read(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(GZ + GZ + bytes(512))
    (tmp_path / "b.jsonl.zst").write_bytes(b"\x50\x2a\x4d\x18\x03\0\0\0abc" + ZST)
    assert run(tmp_path, "a.jsonl.gz").records == 800
    assert run(tmp_path, "b.jsonl.zst").records == 400


@pytest.mark.parametrize(("raw", "found"), [(GZ, "gzip data"), (ZST, "Zstandard data")], ids=["gz", "zst"])
def test_compressed_data_under_the_name_of_plain_lines_are_named(tmp_path, raw, found):
    (tmp_path / "a.jsonl").write_bytes(raw)
    with pytest.raises(FormatError, match=rf"a\.jsonl:1: JSON lines must be text, found {found}: give the file a name"):
        run(tmp_path, "a.jsonl")


def test_kinds_are_told_by_their_beginnings():
    assert begins_as(GZ[:1], GZIP)
    assert not begins_as(LINES, ZSTANDARD)
    assert kind_of("a\u6771".encode()[:3]) == "plain text"
    assert kind_of(b"\x1f\x8b") == "gzip data"
    assert kind_of(b"") is None


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("found", ["xz data", "bzip2 data", "gzip data", "Zstandard data"])
def test_a_stated_format_does_not_hide_the_kind_of_the_data(tmp_path, name, found):
    (tmp_path / "a.bin").write_bytes(OTHERS[found])
    with pytest.raises(FormatError, match=rf"a\.bin:1: .* must be text, found {found}: give the file a name"):
        run(tmp_path, "a.bin", input_format="jsonl" if name == "a.jsonl" else "txt")


def test_a_tar_archive_among_lines_is_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("a.jsonl")
        info.size = len(LINES)
        archive.addfile(info, io.BytesIO(LINES))
    with pytest.raises(FormatError, match=r"a\.tar\.gz:1: JSON lines must be text, found a tar archive"):
        run(tmp_path, "a.tar.gz", input_format="jsonl")
