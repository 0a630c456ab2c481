"""Megatron Core's wrappers and requests as programs and other queues call them, on three ranks."""

from pathlib import Path

import pytest
import torch

from tests.support.processes.launching import run_script
from trackbed.checkpoint import ShardedObject, ShardedTensor
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.errors import DistributedCheckpointError
from trackbed.megatron.checkpoints.file_write import FileWrite
from trackbed.megatron.checkpoints.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from trackbed.megatron.checkpoints.strategies import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

RANK = Path(__file__).parent / "wrapper_calls_rank.py"
SIZE = 3


@pytest.fixture(scope="module")
def results():
    """What came of each case, of each rank."""
    of_ranks = [dict(lines) for lines in run_script(RANK, SIZE, limit_seconds=100)]
    return {name: [found[name] for found in of_ranks] for name in of_ranks[0]}


def state_of(value, **more):
    return {**{key: [value] * 5 for key in "abc"}, "o": {"value": value}, **more}


def test_a_request_is_written_by_a_forked_process_and_completed_by_this_one(results):
    for found in results["a_request_in_a_forked_process"]:
        assert found[::2] == [0, 0, 0]
        for number, (values, files) in enumerate(found[1::2]):
            assert values == state_of(number + 1.0)
            names = [name for name in files if not name.endswith(".distcp")]
            own = ["common.pt", "metadata.json"] if number == 2 else []
            assert names == [".metadata", *own, "trackbed.extents"]


def test_a_request_is_written_from_a_pickle(results):
    assert results["a_request_as_a_pickle"] == [state_of(4.0, step=4)] * SIZE


def test_a_request_whose_process_is_gone_fails_on_all_ranks_and_leaves_no_folder(results):
    for kinds, text, left in results["a_request_whose_process_fails_on_one_rank"]:
        assert "CheckpointError" in kinds
        assert "rank 1: " in text
        assert "async_fn must have returned before finalize_fns are called, but has written no result" in text
        assert left == []


def test_a_request_that_cannot_write_in_another_process_says_why_on_all_ranks(results):
    codes = [code for code, _, _ in results["a_request_that_cannot_write_in_a_forked_process"]]
    assert codes == [0, 1, 0]
    for _, _, text in results["a_request_that_cannot_write_in_a_forked_process"]:
        assert "async_fn must have written the files, but failed: rank 1: FileExistsError" in text


def test_a_request_that_fails_at_once_leaves_no_folder(results):
    for rank, (kinds, text, left) in enumerate(results["a_request_that_fails_at_once_on_one_rank"]):
        assert text == "save: rank 1: OSError: no"
        assert ("OSError" in kinds) == (rank == 1)
        assert "Stopped" not in kinds
        assert left == []


def test_a_cached_distribution_needs_no_other_rank(results):
    for saving_or_loading in range(2):
        seconds, ids = zip(*(found[saving_or_loading] for found in results["a_cached_distribution"]), strict=True)
        assert max(seconds) < 0.3  # others come 0.5 seconds later
        assert [sorted(column) for column in zip(*ids, strict=True)] == [[0, 1, 1]] * 3  # each by one rank


def test_another_structure_than_that_of_a_cached_distribution_is_an_error(results):
    for texts in results["a_cached_distribution_of_another_structure"]:
        assert [text[0] for text in texts] == ["d", "b", "c"] * 2
        for text in texts:
            assert "the structure of the state must be the same in each call with do_cache_distribution=True" in text


def test_a_load_in_a_group_of_one_waits_for_no_other_rank(results):
    (own, stored, seconds), *others = results["a_load_in_a_group_of_one"]
    assert own == {**{key: [7.0] * 5 for key in "abc"}, "o": "object o"}
    assert stored == state_of(9.0)
    assert seconds < 1
    assert others == [None] * 2


def test_two_ranks_of_three_load_what_the_third_has_the_main_replica_of(results):
    *pair, third = results["a_load_of_two_ranks_of_three"]
    assert third is None
    for found in pair:
        assert found[::2] == [{**{key: [7.0] * 5 for key in "abc"}, "o": "object o"}] * 3
        assert found[1::2] == [state_of(9.0)] * 3


def test_a_wrapper_returns_what_its_strategy_does(results):
    assert results["what_a_strategy_returns"] == ["saved"] * SIZE


def test_the_error_of_a_strategy_has_its_class_and_ours(results):
    wanted = [kind for kind in ("FileNotFoundError", "NotImplementedError", "OwnError") for _ in range(2)]
    for found in results["what_a_strategy_raises"]:
        for kind, (kinds, text) in zip(wanted, found, strict=True):
            assert {kind, "DistributedCheckpointError", "CheckpointException"} <= set(kinds)
            assert f"rank 0, rank 1 and rank 2: {kind}: " in text


def test_an_unknown_way_to_exchange_is_not_implemented_on_any_rank(results):
    for found in results["an_unknown_way_to_exchange"]:
        for kinds, text in found:
            assert "NotImplementedError" in kinds
            assert "exchange_algo: must be one of broadcast, gather_object, gather_rounds, found 'x'" in text


def test_a_tensor_of_which_no_rank_has_the_main_replica_is_refused_by_all_ways_to_save(results):
    words = "b: what a rank has must be in a main replica of some rank, but no main replica has [0:5], of which ranks 0"
    for found in results["a_tensor_without_a_main_replica"]:
        assert len(found) == 13
        for (kinds, text), is_as_before in found:
            assert "CheckpointError" in kinds
            assert words in text
            assert is_as_before


def test_an_object_of_which_no_rank_has_the_main_replica_is_refused(results):
    for found in results["an_object_without_a_main_replica"]:
        for _, text in found:
            assert "o: what a rank has must be in a main replica of some rank" in text


def test_a_main_replica_in_another_group_is_right(results):
    of_ranks = results["a_main_replica_in_another_group"]
    assert [ids for ids, _ in of_ranks] == [[0] * 3, [1] * 3, [2] * 3]  # groups of one rank stay as they are
    assert [values for _, values in of_ranks] == [state_of(6.0)] * SIZE


def test_a_copy_of_another_box_is_not_saved_in_the_place_of_the_main_replica(results):
    for found in results["a_copy_of_a_larger_box_at_the_place_of_the_main_replica"]:
        assert found["w"] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_part_that_no_rank_has_may_be_missing(results):
    assert results["a_part_that_no_rank_has"] == [{"w": [1.0, 1.0]}] * SIZE


def state(value=0.0, replica_id=0):
    data = torch.full((4,), value)
    return {
        "w": ShardedTensor.from_rank_offsets("w", data, replica_id=replica_id),
        "o": ShardedObject("o", {"value": value}, (1,), (0,)),
    }


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("way", ["broadcast", "gather_rounds", "gather_object"])
def test_wrappers_save_and_load_in_one_process_without_torch_distributed(tmp_path, caches, way):
    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), None, caches)
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), None, caches, way)
    for step in range(2):
        serialization.save({**state(step + 2.0), "step": step}, tmp_path / str(step), saver)
        found = serialization.load(state(), tmp_path / str(step), loader)
        assert (found["w"].tolist(), found["o"], found["step"]) == ([step + 2.0] * 4, {"value": step + 2.0}, step)
    (tmp_path / "direct").mkdir()
    saver.async_save(state(5.0), tmp_path / "direct").execute_sync()
    assert loader.load(state(), tmp_path / "direct")["w"].tolist() == [5.0] * 4
    with pytest.raises(CheckpointError, match="w: what a rank has must be in a main replica"):
        FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()).apply_saving_parallelization(
            state(replica_id=1)
        )


def test_a_wrapped_strategy_that_fails_in_one_process_raises_its_class(tmp_path):
    wrapper = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), exchange_algo="x")
    with pytest.raises(DistributedCheckpointError, match="missing"):
        wrapper.load(state(), tmp_path / "missing")


def test_tensors_that_lie_elsewhere_are_staged_and_views_are_pickled_without_their_storage():
    import pickle

    large = torch.arange(1 << 16, dtype=torch.float32)
    write = FileWrite(Path("anywhere"), [large[5:7], b"object"], 0)
    assert not write.needs_staging()
    assert len(pickle.dumps(write)) < 4000
    staged = write.staged()
    large.zero_()
    assert staged[0].tolist() == [5.0, 6.0]
    assert staged[1] == b"object"
    assert FileWrite(Path("anywhere"), [torch.empty(2, device="meta")], 0).needs_staging()
