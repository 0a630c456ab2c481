"""Hostile and damaged folders, and addresses: right values or one clear error, and nothing of theirs is called."""

import io
import itertools
import os
import pickle
import shutil
import struct
import subprocess
import time
import warnings
import zipfile
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stores.servers import FolderPlace
from tests.support.tiers import slow_but, with_files
from trackbed.checkpoint import ShardedObject, ShardedTensor, find_damage, load, save
from trackbed.checkpoint.format.allowed_classes import naming_unknown
from trackbed.cli.main import trackbed as command
from trackbed.comm import run_ranks
from trackbed.errors import CheckpointError

VALUES = torch.arange(40_000, dtype=torch.float32)


class Evil:
    """Pickles as a call of a function that leaves a mark."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def evils(mark):
    yield "system", Evil(os.system, f"touch {mark}")
    yield "Popen", Evil(subprocess.Popen, ["touch", str(mark)])
    yield "eval", Evil(eval, f"open({str(mark)!r}, 'w')")
    yield "getattr", Evil(getattr, Path(mark), "touch")
    yield "partial", Evil(__import__("functools").partial, os.system, f"touch {mark}")


def dotted(mark):
    """A pickle that names a function through a module that is allowed."""
    argument = pickle.dumps(f"touch {mark}", protocol=4)[11:-2]
    name = b"serialization.os.system"
    return b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name + b"\x93" + argument + b"\x85R."


def state_of(rank=0, size=1, *, is_empty=False):
    rows = VALUES.chunk(size)[rank]
    return {
        "w": ShardedTensor.from_rank_offsets(
            "w", torch.zeros_like(rows) if is_empty else rows.clone(), (0, rank, size)
        ),
        "o": ShardedObject("o", None if is_empty else {"rank": rank}, (size,), (rank,)),
        "step": 7,
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "checkpoint"
    run_ranks(2, lambda group: save(state_of(group.rank, 2), folder, group=group))
    return folder


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory):
    """What torch saves: a tensor in pieces of one rank, and an object."""
    folder = tmp_path_factory.mktemp("torch") / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": VALUES.clone(), "note": {"a": 5}}, checkpoint_id=str(folder), no_dist=True)
    return folder


def copy_of(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def check_commands(folder, problems):
    """No command shows a traceback; `verify` says what was found."""
    for words in (["ls"], ["inspect"], ["inspect", "--json"], ["verify"], ["diff", str(folder)]):
        result = CliRunner().invoke(command, ["ckpt", words[0], str(folder), *words[1:]])
        assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exc_info)
        assert result.exit_code in (0, 1), words
        assert words[0] != "verify" or (result.exit_code == 1) == bool(problems)


@pytest.mark.parametrize(
    ("name", "number"),
    slow_but(
        [
            *((".metadata", number) for number in range(5)),
            ("common.pt", 0),
            ("common.pt", 3),
            ("object", 1),
            ("object", 4),
        ],
        itertools.product([".metadata", "common.pt", "object"], range(5)),
    ),
)
def test_no_function_of_a_pickle_is_called(place, name, number, of_torch, checkpoint, tmp_path):
    mark = tmp_path / "mark"
    last, evil = list(evils(mark))[number]
    folder = copy_of(of_torch if name != "common.pt" else checkpoint, tmp_path)
    if name == ".metadata":
        (folder / name).write_bytes(pickle.dumps(evil))
    elif name == "common.pt":
        (folder / "trackbed.extents").unlink()
        torch.save({"step": evil}, folder / name)
    else:
        replace_object(folder, evil)
    folder = place.publish(folder)
    with pytest.raises(CheckpointError) as error:
        load({"note": ShardedObject("note", None, (1,), (0,))} if name == "object" else {}, folder)
    assert last in str(error.value)
    # Nobody is advised to allow getattr, which reads any attribute.
    assert ("add_safe_globals" in str(error.value)) == (name != ".metadata" and last != "getattr")
    assert not mark.exists()
    with naming_unknown():  # as the commands look into it
        problems = list(find_damage(folder))
    check_commands(folder, problems)
    assert not mark.exists()


def replace_object(folder, value):
    """Another object in the place of that of torch."""
    stream = io.BytesIO()
    torch.save(value, stream)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == "note.a":
            (folder / "evil").write_bytes(stream.getvalue())
            place.relative_path, place.offset, place.length = "evil", 0, len(stream.getvalue())
            found = {"note/shard_0_1": metadata.state_dict_metadata.pop("note.a")}
            metadata.state_dict_metadata |= found
            del metadata.storage_data[index]
            metadata.storage_data[type(index)("note/shard_0_1")] = place
            break
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_dotted_names_are_refused_as_a_whole(place, of_torch, tmp_path):
    folder = copy_of(of_torch, tmp_path)
    mark = tmp_path / "mark"
    (folder / ".metadata").write_bytes(dotted(mark))
    folder = place.publish(folder)
    with pytest.raises(CheckpointError, match=r"serialization\.os\.system"):
        load({}, folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04N" + b"r\xff\xff\xff\x7f" + b".",
        b"\x80\x04N" + b"p2000000000\n" + b".",
        b"\x80\x04" + b"(" * 2_000_000 + b".",
        b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.",
        b"\x80\x04]" + b"2a" * 100_000 + b".",
        b"\x80\x04\x8c\x05torch\x8c\x04Size\x93(" + b"K\x01" * 100_000 + b"tt\x85R.",
        b"",
        b".",
    ],
)
def test_bombs_are_refused_in_time_and_memory(place, content, of_torch, tmp_path):
    folder = copy_of(of_torch, tmp_path)
    (folder / ".metadata").write_bytes(content)
    folder = place.publish(folder)
    before = peak_kib()
    started = time.process_time()  # the machine may be busy
    with pytest.raises(CheckpointError, match=r"^load: rank 0: CheckpointError: \.metadata"):
        load({}, folder)
    assert time.process_time() - started < 5
    assert peak_kib() - before < 300_000


def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_a_compressed_member_is_refused(place, checkpoint, tmp_path):
    folder = copy_of(checkpoint, tmp_path)
    (folder / "trackbed.extents").unlink()
    torch.save({"step": torch.zeros(10_000_000)}, folder / "common.pt")
    with zipfile.ZipFile(folder / "common.pt") as plain:
        members = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(folder / "common.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    folder = place.publish(folder)
    with pytest.raises(CheckpointError, match=r"common\.pt: members must be stored plainly, but .* is compressed"):
        load({}, folder)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", ""])
def test_files_outside_of_the_folder_are_not_read(path, place, of_torch, tmp_path):
    folder = copy_of(of_torch, tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for found in metadata.storage_data.values():
        found.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    folder = place.publish(folder)
    with pytest.raises(CheckpointError, match="files must lie in the folder of the checkpoint"):
        load({}, folder)


def test_an_allowed_class_is_loaded(tmp_path):
    folder = tmp_path / "checkpoint"
    value = Fraction(1, 3)
    with torch.serialization.safe_globals([Fraction]):
        save({"o": ShardedObject("o", value, (1,), (0,)), "c": value}, folder)
        assert load({"o": ShardedObject("o", None, (1,), (0,))}, folder) == {"o": value, "c": value}
    for request in ({"o": ShardedObject("o", None, (1,), (0,))}, {}):
        with pytest.raises(CheckpointError, match="Fraction"):
            load(request, folder)


def test_an_object_that_could_not_be_loaded_is_not_saved(tmp_path):
    for state in ({"o": ShardedObject("o", Fraction(1), (1,), (0,))}, {"c": Fraction(1)}):
        with pytest.raises(CheckpointError, match="Fraction"):
            save(state, tmp_path / "checkpoint")
        assert list(tmp_path.iterdir()) == []


@with_files
@given(st.data())
def test_any_damage_gives_right_values_or_one_error(place, checkpoint, of_torch, tmp_path_factory, data):
    is_ours = data.draw(st.booleans())
    whole = checkpoint if is_ours else of_torch
    folder = tmp_path_factory.mktemp("damaged") / "checkpoint"
    shutil.copytree(whole, folder)
    names = sorted(path.name for path in folder.iterdir())
    # Nothing says what the bytes of torch's own metadata should be.
    name = data.draw(st.sampled_from([name for name in names if is_ours or name != ".metadata"]))
    content = bytearray((folder / name).read_bytes())
    kind = data.draw(st.sampled_from(["flip", "flip", "cut", "remove", "longer"]))
    if kind == "flip":
        number = data.draw(st.integers(0, len(content) - 1))
        content[number] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "longer":
        content += b"x"
    (folder / name).unlink() if kind == "remove" else (folder / name).write_bytes(content)
    path = place.publish(folder)
    problems = list(find_damage(path))
    request = {"w": state_of(is_empty=True)["w"]}
    if is_ours:
        request |= {str(place): ShardedObject("o", None, (2,), (place,)) for place in range(2)}
    found, text = None, ""
    try:
        found = load(request, path)
    except CheckpointError as error:
        text = str(error)
    if found is None:
        assert problems, (name, kind)
        assert any(named in text for named in names), text
    else:
        assert torch.equal(found["w"], VALUES)
        assert not is_ours or (found["0"], found["1"], found["step"]) == ({"rank": 0}, {"rank": 1}, 7)
        assert not (is_ours and problems) or kind in ("flip", "longer"), problems
    shutil.rmtree(folder)


@pytest.mark.parametrize("place", slow_but(["folder"], ["folder", "moto", "ceph"]), indirect=True)
@with_files
@given(st.binary(max_size=300), st.sampled_from([".metadata", "common.pt", "metadata.json", "trackbed.extents"]))
def test_any_bytes_are_a_description_or_an_error(place, checkpoint, of_torch, tmp_path_factory, content, name):
    whole = checkpoint if name in ("trackbed.extents", "common.pt") else of_torch
    folder = tmp_path_factory.mktemp("random") / "checkpoint"
    shutil.copytree(whole, folder)
    if name == "common.pt":
        (folder / "trackbed.extents").unlink()
    (folder / name).write_bytes(content)
    path = place.publish(folder)
    with suppress(CheckpointError):
        load({}, path)
    problems = list(find_damage(path))
    if isinstance(place, FolderPlace):  # commands read addresses in no other way
        check_commands(path, problems)
    shutil.rmtree(folder)


def test_a_description_of_more_than_there_is_is_refused(place, checkpoint, tmp_path):
    folder = copy_of(checkpoint, tmp_path)
    path = folder / "trackbed.extents"
    content = path.read_bytes()
    head = content[24 : 24 + struct.unpack("<Q", content[16:24])[0]]
    for other in (head.replace(b'"rows":4', b'"rows":9000000000'), head.replace(b'"axes":1', b'"axes":70')):
        assert other != head
        body = content[:16] + struct.pack("<Q", len(other)) + other + content[24 + len(head) : -4]
        path.write_bytes(body + struct.pack("<I", __import__("zlib").crc32(body)))
        with pytest.raises(CheckpointError, match=r"trackbed\.extents"):
            load({}, place.publish(folder))
