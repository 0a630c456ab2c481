"""Values that Megatron-LM's jobs save: their arguments, states of random numbers, and classes of their own."""

import argparse
import contextlib
import enum
import pathlib
import random
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import trackbed
from trackbed.checkpoint.format.allowed_classes import naming_unknown
from trackbed.checkpoint.format.safe_pickle import load_torch_item, torch_bytes
from trackbed.errors import CheckpointError

DATA = {
    "args": argparse.Namespace(lr=1.0, path=None, nested=types.SimpleNamespace(x=1)),
    "folder": pathlib.PosixPath("a/b"),
    "signal": signal.SIGTERM,
    "numpy": np.arange(3, dtype=np.uint32),
    "halves": np.ones((2, 2), dtype=np.float16),
    "rng": np.random.RandomState(0).get_state(),
    "python": random.Random(0).getstate(),
}


class Kind(enum.Enum):
    """An enumeration of the program."""

    FIRST = 1


class Settings:
    """A class of the program."""

    def __init__(self, value):
        self.value = value


def run(*words):
    return subprocess.run([sys.executable, "-m", "trackbed", "ckpt", *map(str, words)], capture_output=True, text=True)


def written(folder, state):
    """A checkpoint of another program, with these plain values."""
    weight = trackbed.ShardedTensor.from_rank_offsets("weight", torch.ones(3))
    trackbed.save({"weight": weight, "step": 1}, folder)
    torch.save(state, folder / "common.pt")
    (folder / "trackbed.extents").unlink()
    return folder


def test_data_is_saved_and_loaded_and_nothing_more_is_allowed_afterwards(tmp_path):
    before = set(map(str, torch.serialization.get_safe_globals()))
    trackbed.save(dict(DATA), tmp_path / "saved")
    found = trackbed.load(tmp_path / "saved")
    assert found["args"] == DATA["args"]
    assert all(type(found[key]) is type(value) for key, value in DATA.items())
    assert np.array_equal(found["rng"][1], DATA["rng"][1])
    assert set(map(str, torch.serialization.get_safe_globals())) == before


def test_what_the_program_allows_stays_allowed():
    with torch.serialization.safe_globals([argparse.Namespace]):
        load_torch_item(torch_bytes(DATA, "x"), "x")
        assert argparse.Namespace in torch.serialization.get_safe_globals()


@pytest.mark.slow
def test_the_command_line_looks_into_a_checkpoint_with_classes_that_it_does_not_know(tmp_path):
    classes = {"kind": Kind.FIRST, "settings": Settings(3), "args": argparse.Namespace(kind=Kind.FIRST)}
    one = written(tmp_path / "one", {**DATA, **classes})
    same = written(tmp_path / "same", {**DATA, **classes})
    other = written(tmp_path / "other", {**DATA, **classes, "settings": Settings(4)})
    with pytest.raises(CheckpointError, match=r"must be made of classes that are allowed, but has '(Kind|Settings)'"):
        trackbed.load(one)
    found = run("inspect", one)
    assert (found.returncode, found.stderr) == (0, "")
    assert "args" in found.stdout
    found = run("verify", one)
    assert found.returncode == 0
    note = "note: load takes objects of these classes only if the program allows them: "
    assert found.stderr == f"{note}{Kind.__module__}.Kind, {Kind.__module__}.Settings\n"
    assert run("diff", one, same).returncode == 0
    found = run("diff", one, other)
    assert found.returncode == 1
    assert "settings" in found.stdout


def test_unknown_classes_run_no_code(tmp_path):
    class Trap:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "touched",)

    path = tmp_path / "trap.pt"
    torch.save({"trap": Trap()}, path)
    with naming_unknown(), contextlib.suppress(CheckpointError):
        load_torch_item(path.read_bytes(), "x")
    assert not (tmp_path / "touched").exists()
