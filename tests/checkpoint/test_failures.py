"""One of three ranks fails in each phase of a save or load: every rank raises, and nothing changes."""

import contextlib
import threading
import time
from importlib import import_module

import pytest
import torch

from trackbed.checkpoint import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    latest_checkpoint,
    load,
    open_checkpoint,
    save,
)
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.comm import run_ranks
from trackbed.errors import CheckpointError
from trackbed.files.publish import publish

FAILING = 2
save_module, load_module, begin_module, local_module, targets_module = (
    import_module(f"trackbed.checkpoint.{name}") for name in ("save", "load", "begin_save", "local_save", "io.targets")
)
SAVE_PHASES = {
    "describe": (save_module, "describe_state"),
    "tabulate": (save_module, "tabulate"),
    "validate": (save_module, "require_valid"),
    "write": (targets_module.FileTarget, "write"),
    "write an item": (targets_module, "write_items"),
    "collect": (save_module, "collect"),
}
COMMIT_PHASES = {
    "partial folder": (begin_module, "make_partial_folder"),
    "descriptions": (save_module, "descriptions"),
    "commit": (local_module, "commit_checkpoint"),
}
LOAD_PHASES = {
    "describe": (load_module, "describe_request"),
    "open": (load_module, "open_for_all"),
    "check": (load_module, "require_loadable"),
    "read": (load_module, "fill_boxes"),
    "read an object": (BoxReader, "read_object"),
}


class Injector:
    """Fails in one function on one rank, which is a thread."""

    def __init__(self, monkeypatch, place, error):
        owner, name = place
        function = getattr(owner, name)
        self._here = threading.local()

        def inject(*arguments, **options):
            if getattr(self._here, "is_failing", False):
                self._here.is_failing = False
                raise error
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, inject)

    def arm(self, is_failing):
        self._here.is_failing = is_failing


def state_of(rank, value=0.0, build=None, merge=None):
    def plain(key, data, replica_id, flattened_range):
        return {"half": ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id)}

    factory = ShardedTensorFactory("f", torch.full((2,), value), build or plain, merge or (lambda x: x["half"]), rank)
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((3, 2), value), (0, rank, 3)),
        "o": ShardedObject("o", {"value": value}, (3,), (rank,)),
        "f": factory,
    }


def outcome(function, *arguments, **options):
    """Text of a CheckpointError, and the seconds until it was raised."""
    start = time.monotonic()
    with pytest.raises(CheckpointError) as found:
        function(*arguments, **options)
    return str(found.value), time.monotonic() - start


def check_intact(group, path):
    loaded = load(state_of(group.rank, 9.0), path, group=group)
    assert loaded["w"].tolist() == [[1.0, 1.0]] * 3
    assert loaded["f"].tolist() == [1.0, 1.0]
    assert loaded["o"] == {"value": 1.0}


@pytest.mark.parametrize("error", [ValueError("no good"), OSError(28, "No space left on device", "/x/__2_0.distcp")])
@pytest.mark.parametrize("phase", [*SAVE_PHASES, *COMMIT_PHASES])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(tmp_path, monkeypatch, phase, error):
    path = tmp_path / "checkpoint"
    failing = FAILING if phase in SAVE_PHASES else 0
    run_ranks(3, lambda group: save(state_of(group.rank, 1.0), path, group=group))
    injector = Injector(monkeypatch, (SAVE_PHASES | COMMIT_PHASES)[phase], error)

    def work(group):
        injector.arm(group.rank == failing)
        text, seconds = outcome(save, state_of(group.rank, 2.0), path, group=group)
        assert f"rank {failing}" in text
        assert str(error) in text
        assert seconds < 2
        group.barrier()
        assert list(tmp_path.iterdir()) == [path]
        check_intact(group, path)
        save(state_of(group.rank, 1.0), path, group=group)
        check_intact(group, path)

    run_ranks(3, work)


@pytest.mark.parametrize("phase", LOAD_PHASES)
def test_a_load_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(tmp_path, monkeypatch, phase):
    path = tmp_path / "checkpoint"
    run_ranks(3, lambda group: save(state_of(group.rank, 1.0), path, group=group))
    injector = Injector(monkeypatch, LOAD_PHASES[phase], ValueError("no good"))

    def work(group):
        injector.arm(group.rank == FAILING)
        text, seconds = outcome(load, state_of(group.rank), path, group=group)
        assert "rank 2" in text
        assert "no good" in text
        assert seconds < 2
        check_intact(group, path)

    run_ranks(3, work)


@pytest.mark.parametrize("place", ["build", "merge"])
def test_a_factory_that_fails_on_one_rank_fails_on_all(tmp_path, place):
    path = tmp_path / "checkpoint"
    run_ranks(3, lambda group: save(state_of(group.rank, 1.0), path, group=group))

    def fail(*arguments):
        raise KeyError("lost")

    def work(group):
        functions = {place: fail} if group.rank == FAILING else {}
        if place == "build":
            text, _ = outcome(save, state_of(group.rank, 2.0, **functions), path, group=group)
            assert "rank 2: CheckpointError: f: build_fn failed, KeyError: 'lost'" in text
        text, _ = outcome(load, state_of(group.rank, 2.0, **functions), path, group=group)
        assert f"rank 2: CheckpointError: f: {place}_fn failed, KeyError: 'lost'" in text
        check_intact(group, path)

    run_ranks(3, work)


def test_one_process_raises_the_same_errors(tmp_path):
    def fail(*arguments):
        raise KeyError("lost")

    factory = ShardedTensorFactory("f", torch.zeros(2), fail, fail)
    for call in (save, load):
        with pytest.raises(CheckpointError, match=f"{call.__name__}: rank 0: .*f: build_fn failed, KeyError: 'lost'"):
            call({"f": factory}, tmp_path / "checkpoint")


@pytest.mark.parametrize("moved", range(5))
def test_among_files_of_others_a_checkpoint_that_was_moved_in_part_is_none(moved, tmp_path, monkeypatch):
    """A process that ends in between leaves the files that were moved: the last one makes them a checkpoint."""
    folder = tmp_path / "step-0000002"
    save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(3))}, tmp_path / "step-0000001")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    calls = []

    def publish_some(partial, final):
        calls.append(final.name)
        if len(calls) > moved:
            raise OSError("it broke")
        publish(partial, final)

    monkeypatch.setattr(import_module("trackbed.checkpoint.commit"), "publish", publish_some)
    with contextlib.suppress(CheckpointError):
        save({"a": ShardedTensor.from_rank_offsets("a", torch.zeros(3))}, folder)
    monkeypatch.undo()
    is_whole = calls[moved:] == []
    assert latest_checkpoint(tmp_path) == (folder if is_whole else tmp_path / "step-0000001")
    if not is_whole:
        with pytest.raises(CheckpointError):
            open_checkpoint(folder)
    save({"a": ShardedTensor.from_rank_offsets("a", torch.full((3,), 2.0))}, folder)
    assert open_checkpoint(folder)["a"][:].tolist() == [2.0] * 3
    assert (folder / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000001", "step-0000002"]
