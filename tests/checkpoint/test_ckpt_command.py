"""`trackbed ckpt`."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from trackbed.checkpoint import ShardedObject, ShardedTensor, save
from trackbed.cli.main import trackbed
from trackbed.comm import run_ranks


def run(*arguments):
    found = CliRunner().invoke(trackbed, ["ckpt", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def save_on(size, path, value=1.0, **more):
    def work(group):
        rows = torch.full((4 // size, 3), value)
        entry = ShardedTensor.from_rank_offsets("w", rows, (0, group.rank, size))
        place = ShardedObject("rng", {"x": 1}, (1,), (0,), replica_id=group.rank)
        save({"w": entry, "rng": place, "step": 3, **more}, path, group=group)

    run_ranks(size, work)
    return path


@pytest.fixture
def checkpoint(tmp_path):
    return save_on(2, tmp_path / "one")


def test_contents_are_listed(checkpoint):
    status, output = run("ls", checkpoint)
    assert status == 0
    assert "float32" in output
    assert "4 x 3" in output
    assert "1 tensors, 1 objects" in output


def test_a_checkpoint_is_described(checkpoint):
    status, output = run("inspect", checkpoint, "--json")
    found = json.loads(output)
    assert status == 0
    assert (found["saved_by"], found["format"], found["common_keys"]) == ("trackbed", ["torch_dist", 1], ["step"])
    assert found["files"] == ["__0_0.distcp", "__1_0.distcp"]
    assert {row["key"]: row["shape"] for row in found["contents"]} == {"w": [4, 3], "rng/shard_0_1": None}
    assert "saved by: trackbed" in run("inspect", checkpoint)[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchs_checkpoints_are_described_too(tmp_path):
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=str(tmp_path / "torchs"), no_dist=True)
    assert json.loads(run("inspect", tmp_path / "torchs", "--json")[1])["saved_by"] == "torch"
    assert run("verify", tmp_path / "torchs")[0] == 0


def test_damage_is_exit_status_1(checkpoint, tmp_path):
    assert run("verify", checkpoint) == (0, f"{checkpoint}: ok\n")
    file = checkpoint / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, output = run("verify", checkpoint)
    assert status == 1
    assert output.startswith("trackbed: __1_0.distcp: its checksum must be")
    assert run("verify", tmp_path)[0] == 1
    assert run("verify")[0] == 2


def test_two_checkpoints_are_compared_in_any_layout(checkpoint, tmp_path):
    assert run("diff", checkpoint, save_on(4, tmp_path / "two")) == (0, "equal: 1 tensors, 1 objects\n")
    other = save_on(1, tmp_path / "three", 2.0, more={"a": 1}, v=ShardedTensor.from_rank_offsets("v", torch.zeros(1)))
    status, output = run("diff", checkpoint, other)
    assert status == 1
    assert output.splitlines() == ["only in B: v", "w: 12 of 12 elements differ", "common state: differs"]


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_hostile_folders_show_no_traceback(tmp_path, command):
    for name, content in (
        (".metadata", b"cos\nsystem\n(S'true'\ntR."),
        ("trackbed.extents", b"x"),
        ("metadata.json", b"{"),
    ):
        path = tmp_path / name.strip(".")
        path.mkdir()
        (path / name).write_bytes(content)
        status, output = run(command, path)
        assert status == 1
        assert name in output
