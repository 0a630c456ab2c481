"""`trackbed ckpt`."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from tests.support.hostile.checkpoints import HOSTILE, write_whole
from trackbed.checkpoint import ShardedObject, ShardedTensor, load, save
from trackbed.cli.main import trackbed
from trackbed.comm import run_ranks
from trackbed.errors import CheckpointError


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
    assert "1 sharded tensor, 1 object" in output
    assert "`trackbed ckpt inspect` shows the keys of plain values" in output
    status, output = run("ls", checkpoint, "--json")
    assert (status, json.loads(output)[0]["key"]) == (0, "w")


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
    assert output.startswith(f"trackbed: {checkpoint}: __1_0.distcp: its checksum must be")
    assert run("verify", tmp_path)[0] == 1
    assert run("verify")[0] == 2


def test_two_checkpoints_are_compared_in_any_layout(checkpoint, tmp_path):
    assert run("diff", checkpoint, save_on(4, tmp_path / "two")) == (0, "equal: 1 tensors, 1 objects\n")
    other = save_on(1, tmp_path / "three", 2.0, more={"a": 1}, v=ShardedTensor.from_rank_offsets("v", torch.zeros(1)))
    status, output = run("diff", checkpoint, other)
    assert status == 1
    assert output.splitlines() == [
        "only in B: v",
        "w: 12 of 12 elements differ, by 1 at most",
        "common state: only in B: more",
    ]
    assert run("diff", "--tensors", checkpoint, other)[1].splitlines() == [
        "only in B: v",
        "w: 12 of 12 elements differ, by 1 at most",
    ]
    other = save_on(2, tmp_path / "four", more={"a": 1})
    assert run("diff", checkpoint, other)[0] == 1
    assert run("diff", "--tensors", checkpoint, other) == (0, "equal: 1 tensors\n")


def test_small_differences_are_forgiven_where_that_is_asked_for(checkpoint, tmp_path):
    near = save_on(1, tmp_path / "near", 1.0 + 2**-20)
    assert run("diff", checkpoint, near) == (1, "w: 12 of 12 elements differ, by 9.54e-07 at most\n")
    assert run("diff", "--tolerance", "1e-7", checkpoint, near) == (
        1,
        "w: 12 of 12 elements differ, by 9.54e-07 at most\n",
    )
    equal = "equal within 1e-06 (the largest difference is 9.54e-07): 1 tensors, 1 objects\n"
    assert run("diff", "--tolerance", "1e-6", checkpoint, near) == (0, equal)
    for wrong in ("-1", "nan", "inf", "x"):
        assert run("diff", "--tolerance", wrong, checkpoint, near)[0] == 2
    other = save_on(1, tmp_path / "other", more={"a": 1})
    assert run("diff", "--tolerance", "9", checkpoint, other)[0] == 1


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "diff"])
def test_hostile_folders_show_no_traceback(tmp_path, checkpoint, command):
    for name, content in (
        (".metadata", b"cos\nsystem\n(S'true'\ntR."),
        ("trackbed.extents", b"x"),
        ("metadata.json", b"{"),
    ):
        path = tmp_path / name.strip(".")
        path.mkdir()
        (path / name).write_bytes(content)
        for others in [(), (path,), (checkpoint,)] if command == "diff" else [()]:
            status, output = run(command, path, *others)
            assert status == (2 if (command, others) == ("diff", ()) else 1)
            assert status == 2 or name in output


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_whole(folder)
    return folder


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_any_command_ends_with_a_sentence(name, whole, tmp_path):
    kind, apply = HOSTILE[name]
    folder = tmp_path / "hostile"
    shutil.copytree(whole / kind, folder)
    apply(folder)
    for words in (["ls"], ["inspect"], ["inspect", "--json"], ["verify"]):
        check_ending(*run(words[0], folder, *words[1:]))
    for pair in ((folder, folder), (folder, whole / kind), (whole / kind, folder)):
        check_ending(*run("diff", *pair))
    try:
        load({}, folder, allow_parts=True)
    except CheckpointError:
        assert run("verify", folder)[0] in (1, 2)


def check_ending(status, output):
    lines = output.splitlines()
    assert status in (0, 1) or lines[-1].startswith("Error: Invalid value for "), output  # no folder
    assert status == 0 or lines[-1]
    assert all("Traceback" not in line for line in lines)


def test_a_dangling_link_is_no_damage(checkpoint):
    (checkpoint / "link").symlink_to("/nonexistent/file")
    assert run("verify", checkpoint) == (0, f"{checkpoint}: ok\n")


def test_what_a_terminal_would_obey_is_escaped(tmp_path):
    path = save_on(1, tmp_path / "one", v=ShardedTensor.from_rank_offsets("\x1b[31m", torch.zeros(1)))
    other = save_on(1, tmp_path / "other")
    for found in (run("ls", path), run("inspect", path), run("inspect", path, "--json"), run("diff", path, other)):
        assert "\x1b" not in found[1]
    assert run("diff", path, other) == (1, "only in A: \\x1b[31m\n")


@pytest.mark.parametrize("command", ["ls", "inspect"])
def test_a_terminal_without_unicode_gets_escapes(tmp_path, command):
    save({"g": ShardedTensor.from_rank_offsets("gewicht_\xfc", torch.ones(2)), "\xfc": 1}, tmp_path / "saved")
    found = CliRunner(charset="ascii").invoke(trackbed, ["ckpt", command, str(tmp_path / "saved")])
    assert found.exception is None, found.exception
    assert "\\xfc" in found.output
