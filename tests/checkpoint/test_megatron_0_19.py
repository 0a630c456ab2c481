"""A checkpoint that Megatron Core 0.19 has saved: its common state is an object, and `metadata.json` has two fields."""

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from trackbed.checkpoint import ShardedObject, ShardedTensor, find_damage, load, open_checkpoint, save
from trackbed.checkpoint.format.config_file import CheckpointingConfig, maybe_load_config
from trackbed.cli.main import trackbed
from trackbed.comm import run_ranks
from trackbed.datasets import megatron_releases
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization

GOLDEN = Path(__file__).parent / "golden" / "megatron-core-0.19"
COMMON = {"step": 7, "options": {"name": "golden", "rates": [0.5, 0.25]}, "content_metadata": {"version": 3}}
LOADS = {"trackbed": load, "megatron": serialization.load}


def wanted(rank, size):
    """State to be loaded by a rank, for which the tensors are cut in another way than they were saved."""
    box, zeros = ShardedTensor.from_rank_offsets, torch.zeros
    return {
        "rows": box("rows", zeros(4, 3), replica_id=rank),
        "columns": box("columns", zeros(4 // size, 4, dtype=torch.int64), (0, rank, size)),
        "copies": box("copies", zeros(5, dtype=torch.bfloat16), replica_id=rank),
        "layers": [box("layers", zeros(5), (0, layer, 2), prepend_axis_num=1, replica_id=rank) for layer in range(2)],
        "objects": [ShardedObject("object", None, (2,), (place,), replica_id=rank) for place in range(2)],
    }


def check(found, rank, size):
    parts = [torch.arange(6.0).view(2, 3) + 10 * saver for saver in range(2)]
    assert torch.equal(found["rows"], torch.cat(parts))
    parts = [torch.arange(8).view(4, 2) + 100 * saver for saver in range(2)]
    assert torch.equal(found["columns"], torch.cat(parts, dim=1).chunk(size)[rank])
    assert torch.equal(found["copies"], torch.full((5,), 0.5).bfloat16())
    assert [layer.tolist() for layer in found["layers"]] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]
    assert found["objects"] == [{"rank": 0}, {"rank": 1}]
    assert {key: found[key] for key in COMMON} == COMMON


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "copy"))


@pytest.mark.parametrize(("release", "names"), [("0.16.1", {"x"}), ("0.19.2", {"x", "common_state/shard_0_1"})])
def test_the_common_state_is_listed_and_loaded_as_an_object_where_the_release_has_it_so(
    release, names, tmp_path, monkeypatch
):
    monkeypatch.setattr(megatron_releases, "_current", [release])
    (tmp_path / "checkpoint").mkdir()
    tensor = ShardedTensor.from_rank_offsets("x", torch.arange(3.0))
    serialization.save({"x": tensor, **COMMON}, tmp_path / "checkpoint")
    listed = serialization.load_sharded_metadata(tmp_path / "checkpoint")
    assert set(listed) == names
    found = serialization.load(dict(listed), tmp_path / "checkpoint", strict="raise_all")
    assert found["x"].tolist() == [0, 1, 2]
    assert {key: found[key] for key in COMMON} == COMMON
    if len(names) == 2:
        assert found["common_state/shard_0_1"] == COMMON


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_loaded_in_any_layout(size):
    run_ranks(size, lambda group: check(load(wanted(group.rank, size), GOLDEN, group=group), group.rank, size))


def test_it_is_loaded_under_megatrons_paths():
    found, missing, unexpected = serialization.load(wanted(0, 1), GOLDEN, strict="return_all")
    check(found, 0, 1)
    assert (missing, unexpected) == (set(), set())
    assert serialization.load_common_state_dict(GOLDEN) == COMMON
    assert serialization.load_content_metadata(GOLDEN) == {"version": 3}
    assert set(serialization.load_plain_tensors(GOLDEN)) == {"rows", "columns", "copies", "layers"}
    assert set(serialization.load_sharded_metadata(GOLDEN)) == {
        *("rows", "columns", "copies", "layers"),
        *("object/shard_0_2", "object/shard_1_2"),
    }


def test_its_parts_are_read():
    opened = open_checkpoint(GOLDEN)
    assert opened.load_common() == COMMON
    assert opened.object_keys == ["object/shard_0_2", "object/shard_1_2"]
    assert opened["rows"][1:3, 0].tolist() == [3, 10]


def test_commands_know_it():
    for words, text in (
        (["verify", str(GOLDEN)], f"{GOLDEN}: ok, but without checksums, which other programs do not write\n"),
        (["diff", str(GOLDEN), str(GOLDEN)], "equal: 4"),
    ):
        found = CliRunner().invoke(trackbed, ["ckpt", *words])
        assert found.exit_code == 0
        assert found.output.startswith(text)
    assert "saved by: megatron-core" in CliRunner().invoke(trackbed, ["ckpt", "inspect", str(GOLDEN)]).output


def test_tensors_are_removed_and_its_common_state_stays(copy):
    serialization.remove_sharded_tensors(copy, "ro")
    assert list(open_checkpoint(copy)) == ["columns", "copies", "layers"]
    assert load({}, copy) == COMMON
    assert list(find_damage(copy)) == []


def replace_common(folder, value):
    """Puts another common state into a file of its own."""
    stream = io.BytesIO()
    torch.save([value], stream)
    (folder / "other").write_bytes(stream.getvalue())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = (place for index, place in metadata.storage_data.items() if index.fqn == "common_state/shard_0_1")
    place.relative_path, place.offset, place.length = "other", 0, len(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("program", LOADS)
def test_classes_that_are_not_allowed_are_refused_by_name(program, copy, tmp_path):
    replace_common(copy, {"step": Evil(tmp_path / "mark")})
    with pytest.raises(CheckpointError, match=r"other: common_state/shard_0_1: .*'system'.*add_safe_globals"):
        LOADS[program]({}, copy)
    (problem,) = find_damage(copy)
    assert "'system'" in problem
    for words in (["verify"], ["inspect"], ["ls"], ["diff", str(copy)]):
        found = CliRunner().invoke(trackbed, ["ckpt", words[0], str(copy), *words[1:]])
        assert found.exit_code == (0 if words[0] == "ls" else 1)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("program", LOADS)
def test_a_common_state_that_is_no_dictionary_is_refused(program, copy):
    replace_common(copy, 5)
    with pytest.raises(CheckpointError, match="common_state/shard_0_1: must be a dictionary, but is a int"):
        LOADS[program]({}, copy)


@pytest.mark.parametrize("program", LOADS)
def test_fields_of_the_formats_may_be_missing_or_unknown(program, tmp_path):
    save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(3.0)), "step": 1}, tmp_path / "saved")
    (tmp_path / "saved" / "trackbed.extents").unlink()
    content = '{"sharded_backend": "torch_dist", "later": {"any": [1]}}'
    (tmp_path / "saved" / "metadata.json").write_text(content)
    assert maybe_load_config(tmp_path / "saved") == CheckpointingConfig("torch_dist", 1, "torch", 1)
    found = LOADS[program]({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3))}, tmp_path / "saved")
    assert (found["w"].tolist(), found["step"]) == ([0, 1, 2], 1)
    assert list(find_damage(tmp_path / "saved")) == []


@pytest.mark.parametrize("program", LOADS)
@pytest.mark.parametrize("content", ["{}", '{"sharded_backend_version": 1}', "[]", '{"sharded_backend": 3}'])
def test_a_format_without_a_name_is_refused(program, content, tmp_path):
    save({"step": 1}, tmp_path / "saved")
    (tmp_path / "saved" / "trackbed.extents").unlink()
    (tmp_path / "saved" / "metadata.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"metadata\.json"):
        LOADS[program]({}, tmp_path / "saved")
