"""A pipe, a device, a socket or a folder in the place of a file of a checkpoint: refused by name, and nothing waits."""

import os
import shutil
import socket
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from trackbed.checkpoint import ShardedTensor, find_damage, load, save
from trackbed.cli.main import trackbed
from trackbed.errors import CheckpointError

VALUES = torch.arange(8.0)
NAMES = [".metadata", "metadata.json", "common.pt", "trackbed.extents", "data"]


def state(*, is_empty=False):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8) if is_empty else VALUES.clone())}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By the program that has saved it: Trackbed, Megatron Core (as far as its files go), torch."""
    folder = tmp_path_factory.mktemp("kinds")
    save({**state(), "step": 3}, folder / "trackbed")
    shutil.copytree(folder / "trackbed", folder / "megatron")
    (folder / "megatron" / "trackbed.extents").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": VALUES.clone()}, checkpoint_id=str(folder / "torch"), no_dist=True)
    return folder


def replace(path, kind):
    """Puts something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))  # a long path does not fit into the address of a socket


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket"])
@pytest.mark.parametrize(
    ("program", "name"),
    [
        *(("trackbed", name) for name in NAMES),
        *(("megatron", name) for name in NAMES if name != "trackbed.extents"),
        ("torch", ".metadata"),
        ("torch", "trackbed.extents"),
        ("torch", "metadata.json"),
        ("torch", "data"),
    ],
)
def test_other_kinds_of_files_are_refused_by_name(program, name, kind, checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "copy"
    shutil.copytree(checkpoints / program, folder)
    path = next(folder.glob("*.distcp")) if name == "data" else folder / name
    replace(path, kind)
    with pytest.raises(CheckpointError) as error:
        load(state(is_empty=True), folder)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)
    problems = list(find_damage(folder))
    assert problems
    assert path.name in problems[0]
    for words in (["ls"], ["inspect"], ["inspect", "--json"], ["verify"], ["diff", str(folder)]):
        status, output = run(words[0], folder, *words[1:])
        assert status in (0, 1), output
        assert words[0] in ("ls", "inspect") or (status, path.name in output) == (1, True)


def run(*arguments):
    found = CliRunner().invoke(trackbed, ["ckpt", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exc_info
    return found.exit_code, found.output


def test_the_command_refuses_a_pipe_in_time(checkpoints, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoints / "torch", folder)
    replace(folder / "metadata.json", "pipe")
    code = "from trackbed.cli.main import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", code, "ckpt", "verify", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == f"trackbed: {folder}: metadata.json: must be a regular file, found a pipe\n"
