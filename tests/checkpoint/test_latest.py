"""The last checkpoint of a folder."""

from functools import partial
from pathlib import Path

import pytest
import torch

import trackbed
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError, TrackbedError


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([], None),
        (["step-9", "step-10", "step-0000008"], "step-10"),
        (["iter_0000100", "99"], "iter_0000100"),
        (["best", "step-5-good"], None),
        (["step-7", "step-9.partial"], "step-7"),
        (["step-0010", "step-10"], "step-10"),
    ],
)
def test_it_is_the_one_with_the_highest_number_at_the_end(names, wanted, tmp_path):
    for name in names:
        trackbed.save({"step": 1}, tmp_path / "other")
        (tmp_path / "other").rename(tmp_path / name)
    (tmp_path / "step-99").mkdir()
    (tmp_path / "step-98").write_text("no folder")
    found = run_ranks(3, lambda group: trackbed.latest_checkpoint(tmp_path, group=group))
    assert found == [None if wanted is None else tmp_path / wanted] * 3


def test_a_file_or_a_checkpoint_is_no_folder_of_checkpoints(tmp_path):
    (tmp_path / "state.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"state.pt: must be a folder of checkpoints, but is a file"):
        trackbed.latest_checkpoint(tmp_path / "state.pt")
    trackbed.save({"step": 1}, tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=r"step-1: must be a folder of checkpoints, but is a checkpoint itself"):
        trackbed.latest_checkpoint(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=r"state.pt: must be a distributed checkpoint, but is a file"):
        trackbed.load(tmp_path / "state.pt")


def test_a_folder_need_not_exist(tmp_path):
    assert trackbed.latest_checkpoint(str(tmp_path / "none")) is None


def test_a_folder_that_cannot_be_read_is_an_error_on_every_rank(tmp_path, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)

    def work(group):
        with pytest.raises(CheckpointError, match=r"latest_checkpoint: rank 0: PermissionError: .*Permission denied"):
            trackbed.latest_checkpoint(tmp_path, group=group)

    run_ranks(2, work)


@pytest.mark.parametrize("lost", ["metadata.json", "__0_0.distcp", "common.pt"])
def test_one_that_is_not_whole_is_passed_over_with_a_warning(lost, tmp_path, caplog):
    entry = trackbed.ShardedTensor.from_rank_offsets("weight", torch.ones(3))
    for step in (1, 2):
        trackbed.save({"weight": entry, "step": step}, tmp_path / f"step-{step}")
    (tmp_path / "step-2" / lost).unlink()
    assert trackbed.latest_checkpoint(tmp_path) == tmp_path / "step-1"
    assert f"step-2: is passed over, because it is not whole: {lost}: must be in" in caplog.text


@pytest.mark.parametrize("address", ["https://host/step-1", Path("gs://bucket/step-1")])
def test_an_address_of_another_kind_is_no_folder_of_a_checkpoint(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "must have one of the schemes s3, gs, az|pass an address as a string"
    for call in (
        partial(trackbed.save, {"step": 1}),
        trackbed.load,
        trackbed.latest_checkpoint,
        trackbed.open_checkpoint,
    ):
        with pytest.raises(TrackbedError, match=words):
            call(address)
    assert not list(tmp_path.iterdir())


def test_a_load_of_no_checkpoint_says_where_none_may_come_from(tmp_path):
    with pytest.raises(CheckpointError, match="must be a path, but is None, as latest_checkpoint returns"):
        trackbed.load_sharded_state(trackbed.latest_checkpoint(tmp_path), torch.nn.Linear(1, 1), group=SOLO)
