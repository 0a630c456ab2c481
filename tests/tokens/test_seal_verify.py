import json
import re
from dataclasses import replace

import numpy as np
import pytest

from trackbed.errors import FormatError
from trackbed.files import CHUNK_BYTES, partial_name
from trackbed.tokens import IndexedDatasetBuilder, Verified, get_seal_path, seal, verify, verify_content
from trackbed.tokens.seal import read_seal

TINY = Verified(dtype="int32", sequences=3, documents=2, tokens=5, bin_bytes=20, idx_bytes=34 + 3 * 12 + 3 * 8)


@pytest.fixture
def sealed(pair):
    """The pair of three sequences, with its seal."""
    seal(str(pair.prefix))
    return pair


def same_json(one, other):
    """True if both texts are the same JSON value."""
    try:
        return json.dumps(json.loads(one)) == json.dumps(json.loads(other))
    except ValueError:
        return False


def test_a_whole_pair_is_verified(pair):
    assert verify(str(pair.prefix)) == TINY


def test_a_sealed_pair_is_verified_byte_by_byte(sealed):
    assert verify_content(str(sealed.prefix)) == TINY


def test_a_pair_with_modes_is_verified_with_them(pair):
    modal = replace(pair, modes=[1, 0, -1]).write()
    seal(str(modal.prefix))
    assert verify_content(str(modal.prefix)) == replace(TINY, idx_bytes=TINY.idx_bytes + 3)
    raw = bytearray(modal.idx.read_bytes())
    raw[-1] ^= 1  # a mode, which only the seal can check
    modal.idx.write_bytes(raw)
    assert verify(str(modal.prefix)).idx_bytes == len(raw)
    with pytest.raises(FormatError, match=r"corpus\.idx: .*CRC-32 .* chunk 0"):
        verify_content(str(modal.prefix))


@pytest.mark.parametrize("flip", [0x01, 0x08, 0x80, 0xFF])
@pytest.mark.parametrize("name", ["bin", "idx"])
def test_a_changed_byte_anywhere_in_the_pair_is_found(sealed, name, flip):
    path = getattr(sealed, name)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
        with pytest.raises(FormatError, match=re.escape(str(sealed.prefix))):
            verify_content(str(sealed.prefix))
    path.write_bytes(whole)
    verify_content(str(sealed.prefix))


@pytest.mark.parametrize("flip", [0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF, 0x2A, 0x03])
def test_a_changed_byte_anywhere_in_the_seal_is_found(sealed, flip):
    whole = sealed.seal.read_bytes()
    for at in range(len(whole)):
        changed = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
        sealed.seal.write_bytes(changed)
        if same_json(changed, whole):  # only whitespace changed
            assert verify_content(str(sealed.prefix)) == TINY
        else:
            with pytest.raises(FormatError):
                verify_content(str(sealed.prefix))


def test_the_whole_seal_is_checked_except_for_whitespace(sealed):
    whole = sealed.seal.read_bytes()
    blank = [at for at in range(len(whole)) if same_json(whole[:at] + b"\t" + whole[at + 1 :], whole)]
    assert all(whole[at : at + 1].isspace() for at in blank)


@pytest.mark.parametrize("name", ["bin", "idx", "seal"])
def test_a_file_cut_off_anywhere_is_found(sealed, name):
    path = getattr(sealed, name)
    whole = path.read_bytes()
    for size in range(len(whole) - 1 if name == "seal" else len(whole)):  # the seal's last byte ends its line
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            verify_content(str(sealed.prefix))


@pytest.mark.parametrize("name", ["bin", "idx", "seal"])
@pytest.mark.parametrize("extra", [b"\x00", b"x", b"1234", bytes(12)])
def test_trailing_bytes_are_found(sealed, name, extra):
    path = getattr(sealed, name)
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(FormatError, match=re.escape(str(path))):
        verify_content(str(sealed.prefix))


@pytest.mark.parametrize("name", ["bin", "idx", "seal"])
def test_a_missing_file_is_named(sealed, name):
    path = getattr(sealed, name)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
        verify_content(str(sealed.prefix))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], "trackbed"),
        (["format"], None),
        (["version"], 2),
        (["version"], "1"),
        (["chunk_bytes"], 1024),
        (["chunk_bytes"], None),
        (["dtype"], "int64"),
        (["dtype"], 4),
        (["sequences"], 4),
        (["sequences"], None),
        (["documents"], 3),
        (["documents"], [2]),
        (["bin"], None),
        (["bin"], 5),
        (["bin"], []),
        (["bin", "size_bytes"], 21),
        (["bin", "size_bytes"], "20"),
        (["bin", "size_bytes"], 20.0),
        (["bin", "size_bytes"], True),
        (["bin", "crc32"], None),
        (["bin", "crc32"], 7),
        (["bin", "crc32"], "00000000"),
        (["bin", "crc32"], {}),
        (["bin", "crc32"], []),
        (["bin", "crc32"], [7]),
        (["bin", "crc32"], [None]),
        (["bin", "crc32"], ["00000000"]),
        (["bin", "crc32", 1], "00000000"),
        (["idx", "crc32"], None),
        (["idx", "crc32"], []),
        (["idx", "size_bytes"], 93),
        (["surprise"], 1),
        (["bin", "surprise"], 1),
    ],
)
def test_a_seal_with_other_values_is_refused(sealed, path, value):
    fields = json.loads(sealed.seal.read_text())
    *parents, last = path
    place = fields
    for parent in parents:
        place = place[parent]
    if isinstance(place, list):
        place.append(value)
    else:
        place[last] = value
    sealed.seal.write_text(json.dumps(fields))
    with pytest.raises(FormatError, match=re.escape(str(sealed.prefix))):
        verify_content(str(sealed.prefix))


@pytest.mark.parametrize("field", ["format", "version", "dtype", "sequences", "documents", "chunk_bytes", "bin", "idx"])
def test_a_seal_without_a_field_is_refused(sealed, field):
    fields = json.loads(sealed.seal.read_text())
    del fields[field]
    sealed.seal.write_text(json.dumps(fields))
    with pytest.raises(FormatError, match=rf"trackbed\.json: a seal must be .*{field}"):
        verify_content(str(sealed.prefix))


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"1", b"null", b'"x"', b"{}", b"[" * 100_000, b"\xff\xfe", b"{]", b"NaN", b"1" * 5000]
)
def test_a_file_that_is_not_a_seal_is_refused(sealed, raw):
    sealed.seal.write_bytes(raw)
    with pytest.raises(FormatError, match=r"corpus\.trackbed\.json: a seal must be a JSON object"):
        verify_content(str(sealed.prefix))


def test_a_pair_exchanged_for_another_whole_one_is_found(sealed):
    replace(sealed, lengths=[2, 1, 2], borders=[0, 2, 3]).write()
    verify(str(sealed.prefix))
    with pytest.raises(FormatError, match=r"corpus\.idx: .*CRC-32"):
        verify_content(str(sealed.prefix))
    replace(sealed, borders=[0, 3]).write()
    with pytest.raises(FormatError, match=r"corpus\.idx: the seal says documents 2, found 1"):
        verify_content(str(sealed.prefix))
    replace(sealed, dtype="float32").write()
    with pytest.raises(FormatError, match="the seal says dtype int32, found float32"):
        verify_content(str(sealed.prefix))


def test_sealing_again_makes_a_changed_pair_right(sealed):
    replace(sealed, tokens=[1, 2, 3, 4, 5]).write()
    with pytest.raises(FormatError, match=r"corpus\.bin: .*CRC-32"):
        verify_content(str(sealed.prefix))
    seal(str(sealed.prefix))
    verify_content(str(sealed.prefix))


def test_a_seal_made_afterwards_is_the_one_the_builder_writes(pair):
    builder = IndexedDatasetBuilder(str(pair.bin))
    builder.add_document([5, 6, 7], [3, 0])
    builder.add_document([-1, 9], [2])
    builder.finalize(str(pair.idx))
    written = pair.seal.read_bytes()
    pair.seal.unlink()
    made = seal(str(pair.prefix))
    assert pair.seal.read_bytes() == written
    assert read_seal(pair.seal) == made


def test_sealing_leaves_only_the_seal_and_clears_what_a_dead_one_left(pair, tmp_path):
    host = partial_name("corpus.trackbed.json").split(".")[-5]
    dead = tmp_path / f"corpus.trackbed.json.{host}.4194305.1.0.partial"
    dead.touch()
    seal(str(pair.prefix))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx", "corpus.trackbed.json"]
    assert get_seal_path(str(pair.prefix)) == str(pair.seal)


def test_a_pair_that_is_no_pair_is_not_sealed(pair):
    replace(pair, version=2).write()
    with pytest.raises(FormatError, match="version"):
        seal(str(pair.prefix))
    assert not pair.seal.exists()


def test_damage_is_located_by_its_chunk(tmp_path):
    prefix = tmp_path / "large"
    count = CHUNK_BYTES // 8 + 1000
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int64)
    builder.add_document(np.zeros(count, dtype=np.int64), [count])
    builder.finalize(f"{prefix}.idx")
    seen = []
    verify_content(str(prefix), progress=seen.append)
    assert sum(seen) == 8 * count + (prefix.parent / "large.idx").stat().st_size
    for at, chunk in ((CHUNK_BYTES - 1, 0), (CHUNK_BYTES, 1)):
        with (tmp_path / "large.bin").open("r+b") as file:
            file.seek(at)
            file.write(b"\x01")
        with pytest.raises(FormatError, match=rf"large\.bin: .* for chunk {chunk}, found"):
            verify_content(str(prefix))
        with (tmp_path / "large.bin").open("r+b") as file:
            file.seek(at)
            file.write(b"\x00")
