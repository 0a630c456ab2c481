"""Damaged files, loaded by several ranks: each gets right values, or all get one error with the file and the tensor."""

import shutil

import pytest
import torch

from trackbed.checkpoint import ShardedTensor, find_damage, load, save
from trackbed.comm import run_ranks
from trackbed.errors import CheckpointError

SIZE = 3
NUM_ROWS = 60


def state_of(rank, first=0.0, *, is_empty=False):
    """Rows of a tensor that is cut between ranks, and a copy of one that all have."""
    rows = torch.arange(NUM_ROWS * 5.0).view(NUM_ROWS, 5) + first
    copies = torch.arange(40, dtype=torch.int64) + int(first)
    if is_empty:
        rows, copies = torch.zeros_like(rows), torch.zeros_like(copies)
    part = rows.chunk(SIZE)[rank].clone()
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", part, (0, rank, SIZE)),
        "copies": ShardedTensor.from_rank_offsets("copies", copies, replica_id=rank),
    }


def save_on_ranks(path, first=0.0):
    run_ranks(SIZE, lambda group: save(state_of(group.rank, first), path, group=group))
    return path


def errors_of(path):
    """Error that each rank raises; None for right values."""

    def work(group):
        try:
            loaded = load(state_of(group.rank, is_empty=True), path, group=group)
        except CheckpointError as error:
            return str(error)
        for key, entry in state_of(group.rank).items():
            assert torch.equal(loaded[key], entry.data)
        return None

    return run_ranks(SIZE, work)


def test_a_flipped_byte_gives_right_values_or_one_error_on_every_rank(tmp_path):
    path = save_on_ranks(tmp_path / "checkpoint")
    num_errors = 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(3, len(content), max(1, len(content) // 40)):
            file.write_bytes(content[:place] + bytes([content[place] ^ 0x20]) + content[place + 1 :])
            found = errors_of(path)
            assert any(file.name in text for text in find_damage(path))
            assert len({text is None for text in found}) == 1, found
            if found[0] is None:
                assert file.suffix == ".distcp"  # a byte that no load reads
                continue
            num_errors += 1
            assert all(text == found[0] for text in found)
            assert file.name in found[0]
            if file.suffix == ".distcp":
                assert "rows" in found[0] or "copies" in found[0]
        file.write_bytes(content)
    assert num_errors > 100
    assert errors_of(path) == [None] * SIZE


@pytest.mark.parametrize("name", ["__0_0.distcp", "__2_0.distcp", ".metadata", "common.pt", "trackbed.extents"])
def test_a_file_of_another_save_is_named_by_every_rank(name, tmp_path):
    path, other = save_on_ranks(tmp_path / "checkpoint"), save_on_ranks(tmp_path / "other", first=1000.0)
    sizes = [(folder / name).stat().st_size for folder in (path, other)]
    assert sizes[0] == sizes[1]
    is_same = (path / name).read_bytes() == (other / name).read_bytes()
    shutil.copyfile(other / name, path / name)
    found, problems = errors_of(path), list(find_damage(path))
    if is_same:  # descriptions of both saves are the same
        assert (found, problems) == ([None] * SIZE, [])
        return
    assert all(text is not None and text == found[0] for text in found)
    assert any(word in found[0] for word in (name, "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"))
    assert "trackbed.extents" in found[0] or "checksum" in found[0]
    assert problems


def test_a_folder_that_changes_between_ranks_is_named(tmp_path):
    """One rank opens another save than the first, as on a file system that shows an old folder."""
    first, second = save_on_ranks(tmp_path / "first"), save_on_ranks(tmp_path / "second")

    def work(group):
        with pytest.raises(CheckpointError, match=r"rank 2: .*must be the same checkpoint on all ranks, of save"):
            load(state_of(group.rank, is_empty=True), second if group.rank == 2 else first, group=group)

    run_ranks(SIZE, work)
