"""Calls in the style of Megatron Core 0.17 and 0.19, which run like those of 0.16.1."""

import pytest
import torch

from trackbed.checkpoint import ShardedObject, ShardedTensor, save
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

CONTENT = {"version": 3}


def state(*, is_empty=False, rank=0, size=1):
    rows = torch.zeros(2) if is_empty else torch.arange(2.0) + rank
    return {
        "w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, size)),
        "o": ShardedObject("o", None if is_empty else rank, (size,), (rank,)),
    }


@pytest.mark.parametrize(
    "arguments",
    [
        (None, None, True, False, None, CONTENT, "mcore"),  # 0.17
        (None, True, False, None, CONTENT, "mcore", True),  # 0.19
        (None, True, False, None, CONTENT, "nvrx"),
        (None, True, False, None, CONTENT),
    ],
)
def test_saves_by_position(arguments, tmp_path):
    serialization.save(state(), tmp_path / "checkpoint", *arguments)
    assert serialization.load_content_metadata(tmp_path / "checkpoint") == CONTENT
    with pytest.raises(TypeError):
        serialization.save(state(), tmp_path / "checkpoint", *arguments, *arguments)


def test_saves_by_name(tmp_path):
    request = serialization.save(
        state(),
        tmp_path / "checkpoint",
        sharded_strategy=None,
        validate_access_integrity=True,
        async_sharded_save=True,
        content_metadata=CONTENT,
        async_strategy="nvrx",
        verify_integrity=True,
    )
    request.execute_sync()
    assert serialization.load_content_metadata(tmp_path / "checkpoint") == CONTENT


def test_integrity_that_is_not_to_be_validated(tmp_path):
    half = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 2))}
    with pytest.raises(CheckpointError, match="no rank has"):
        serialization.save(half, tmp_path / "checkpoint", None, True)
    serialization.save(half, tmp_path / "checkpoint", None, False)
    with pytest.raises(CheckpointError, match="no rank has"):
        serialization.load(half, tmp_path / "checkpoint", None, True)
    assert serialization.load(half, tmp_path / "checkpoint", None, False)["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((None, None, True, "return_all"), {}),  # 0.17
        ((None, True, "return_all", True, None), {}),  # 0.19
        ((None, True, "return_all"), {"verify_integrity": True, "process_group": None}),
        ((), {"validate_access_integrity": True, "strict": "return_all", "verify_integrity": False}),
    ],
)
def test_loads(arguments, names, tmp_path):
    save(state(), tmp_path / "checkpoint")
    found, missing, unexpected = serialization.load(state(is_empty=True), tmp_path / "checkpoint", *arguments, **names)
    assert (found["w"].tolist(), found["o"], missing, unexpected) == ([0, 1], 0, set(), set())


@pytest.mark.parametrize("has_strategy", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_the_process_group_is_that_of_the_ranks(is_named, has_strategy, tmp_path):
    save(state(), tmp_path / "one")

    def work(group):
        save(state(rank=group.rank, size=2), tmp_path / "checkpoint", group=group)
        wanted = state(is_empty=True, rank=group.rank, size=2)
        strategy = TorchDistLoadShardedStrategy() if has_strategy else None
        if is_named:
            return serialization.load(wanted, tmp_path / "checkpoint", strategy, True, process_group=group)
        found, *_ = serialization.load(wanted, tmp_path / "checkpoint", strategy, True, "return_all", False, group)
        return found

    assert [found["o"] for found in run_ranks(2, work)] == [0, 1]


def test_the_ranks_are_given_once(tmp_path):
    save(state(), tmp_path / "checkpoint")
    with pytest.raises(ArgumentError, match="process_group: must be given once"):
        serialization.load(state(), tmp_path / "checkpoint", None, True, "log_all", True, SOLO, process_group=SOLO)


def test_strategies_take_the_name_of_an_implementation(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    saver = TorchDistSaveShardedStrategy("torch_dist", 1, True, 1, False, None, False)
    saver.async_save(state(), tmp_path / "checkpoint", "mcore").execute_sync()
    loader = TorchDistLoadShardedStrategy(cache_metadata=True, stream_ckpt_dequant=True, checkpoint_name="it_1")
    assert not loader.stream_ckpt_dequant
    found = loader.load(state(is_empty=True), tmp_path / "checkpoint", "mcore")
    assert found["w"].tolist() == [0, 1]
    assert loader.load(state(is_empty=True), tmp_path / "checkpoint", async_strategy="nvrx")["o"] == 0
