"""Plain values of a state: no rank's part, and no difference between ranks, is lost in silence."""

import argparse
import collections
import dataclasses
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.processes.fsdp import run_fsdp
from trackbed.checkpoint import ShardedObject, ShardedTensor, ShardedTensorFactory, load
from trackbed.checkpoint.ranks import meet
from trackbed.checkpoint.save import save
from trackbed.checkpoint.state.partial_tensors import is_part, tensors_in
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization

LARGE = 16 << 10
"""Elements of a float32 tensor of 64 KiB."""


class Part(torch.Tensor):
    """A tensor that says how it is divided, as those of other libraries do."""

    def __create_chunk_list__(self):
        return []


class Written(torch.Tensor):
    def __create_write_items__(self, *_):
        return []


class Local(torch.Tensor):
    def to_local(self):
        return self


@dataclasses.dataclass
class Record:
    inner: object


class Opaque:
    def __init__(self, inner):
        self._inner = inner


class Reduced:
    def __init__(self, inner):
        self._inner = inner

    def __reduce__(self):
        return Reduced, (self._inner,)


Pair = collections.namedtuple("Pair", ["first", "second"])

PLACES = {
    "a dictionary": lambda part: {"w": part},
    "a list": lambda part: {"w": [1, part]},
    "a tuple": lambda part: {"w": (1, part)},
    "a named tuple": lambda part: {"w": Pair(1, part)},
    "a tuple of lists": lambda part: {"w": ([{"v": part}],)},
    "a deque": lambda part: {"w": collections.deque([part])},
    "an ordered dictionary": lambda part: {"w": collections.OrderedDict(v=part)},
    "a default dictionary": lambda part: {"w": collections.defaultdict(list, v=[part])},
    "a namespace": lambda part: {"w": argparse.Namespace(v=part)},
    "a simple namespace": lambda part: {"w": types.SimpleNamespace(v=part)},
    "a data class": lambda part: {"w": Record(part)},
    "an object": lambda part: {"w": Opaque([part])},
    "an object that reduces itself": lambda part: {"w": Reduced(part)},
    "an array of objects": lambda part: {"w": np.array([part, None], dtype=object)},
    "the state of an optimizer": lambda part: {"w": {"state": {0: {"exp_avg": part, "step": torch.tensor(1.0)}}}},
    "a ShardedObject": lambda part: {"w": ShardedObject("w", {"v": [part]}, (1,), (0,))},
    "a ShardedTensor": lambda part: {"w": ShardedTensor.from_rank_offsets("w", part)},
    "a factory": lambda part: {
        "w": ShardedTensorFactory("w", part, lambda key, data, *_: {"v": ShardedObject("w", data, (1,), (0,))}, list)
    },
}


def part_of(kind):
    return torch.zeros(4).as_subclass(kind)


@pytest.mark.parametrize("place", PLACES)
def test_a_part_is_refused_by_key_wherever_it_lies(place, tmp_path):
    for kind in (Part, Written, Local):
        state = {"step": 1, **PLACES[place](part_of(kind))}
        for function in (
            lambda state, folder: save(state, folder, group=SOLO),
            lambda state, folder: serialization.save(state, folder, async_sharded_save=True).execute_sync(),
            serialization.save,
        ):
            with pytest.raises(CheckpointError, match=rf"rank 0.*\bw\b.*{kind.__name__}"):
                function(state, tmp_path / "checkpoint")
            assert list(tmp_path.iterdir()) == []


def test_a_rank_with_a_part_is_named_on_all_ranks_and_nothing_is_written(tmp_path):
    def on(group):
        value = part_of(Local) if group.rank == 1 else torch.zeros(4)
        with pytest.raises(CheckpointError, match=r"rank 1: CheckpointError: model.w: .*Local"):
            save({"model": {"w": value}}, tmp_path / "checkpoint", group=group)

    run_ranks(3, on)
    assert list(tmp_path.iterdir()) == []


def test_what_is_whole_is_saved_as_before(tmp_path):
    values = {
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "random": torch.get_rng_state(),
        "array": np.arange(3),
        "nested": [({"x": torch.ones(2)},)],
        "sparse": torch.eye(300).to_sparse(),
        "none": None,
        "shape": torch.Size([2]),
    }
    run_ranks(2, lambda group: save(values, tmp_path / "checkpoint", group=group))
    loaded = load({}, tmp_path / "checkpoint")
    assert torch.equal(loaded["parameter"], values["parameter"])
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(300))
    assert loaded["nested"][0][0]["x"].tolist() == [1, 1]


def test_values_that_refer_to_themselves_are_searched_once():
    ring = [torch.ones(1)]
    ring.append(ring)
    assert [path for path, _ in tensors_in({"ring": ring, "again": ring[0]})] == ["ring.0", "again"]


def test_a_module_or_a_function_is_no_tensor_and_is_left_to_the_pickle():
    assert list(tensors_in({"f": len, "c": Opaque, "g": (x for x in ()), "m": np})) == []
    assert not is_part(torch.nn.Parameter(torch.zeros(2)))


def large(seed, dtype=torch.float32, count=LARGE):
    return torch.randn(count, generator=torch.Generator().manual_seed(int(seed))).to(dtype)


def saved(folder, state_of_rank, *, size=3):
    """Error of a save on some ranks, None if it succeeds."""
    errors = []

    def on(group):
        try:
            save(state_of_rank(group.rank), folder / "checkpoint", group=group)
        except CheckpointError as error:
            errors.append(str(error))

    run_ranks(size, on)
    assert len(errors) in (0, size)
    assert (folder / "checkpoint").exists() == (not errors)
    assert len(list(folder.iterdir())) == (not errors)
    return errors[0] if errors else None


DIFFERENT = {
    "values": lambda rank: {"m": {"w": large(rank == 2)}},
    "one element": lambda rank: {"m": {"w": large(0).index_fill(0, torch.tensor([LARGE - 1]), float(rank == 2))}},
    "the sign": lambda rank: {"m": {"w": -large(0) if rank == 2 else large(0)}},
    "the sign of float64": lambda rank: {"m": {"w": large(0, torch.float64) * (-1 if rank == 2 else 1)}},
    "the sign of zeros": lambda rank: {"m": {"w": torch.zeros(LARGE) * (-1 if rank == 2 else 1)}},
    "shapes": lambda rank: {"m": {"w": large(0, count=LARGE + (rank == 2))}},
    "a large and a small one": lambda rank: {"m": {"w": large(0, count=5 if rank == 2 else LARGE)}},
    "a small one where it is saved": lambda rank: {"m": {"w": large(0, count=LARGE if rank == 2 else 5)}},
    "rows and columns": lambda rank: {"m": {"w": large(0).view((2, -1) if rank == 2 else (-1, 2))}},
    "types": lambda rank: {"m": {"w": large(0).to(torch.float64 if rank == 2 else torch.float32)}},
    "types of one size": lambda rank: {"m": {"w": torch.zeros(LARGE, dtype=(torch.float32, torch.int32)[rank == 2])}},
    "strides, other values": lambda rank: {"m": {"w": large(rank == 2).view(128, 128).t()}},
    "a place in a tuple": lambda rank: {"m": ({"w": large(rank == 2)},)},
    "an array of NumPy": lambda rank: {"m": {"w": np.full(9_000, float(rank == 2))}},
    "a sparse tensor": lambda rank: {"m": {"w": (torch.eye(9_000) * (2 if rank == 2 else 1)).to_sparse()}},
    "a namespace": lambda rank: {"m": argparse.Namespace(w=large(rank == 2))},
    "a tensor that rank 0 does not have": lambda rank: {"m": {"w": large(0)} if rank == 2 else {}},
    "one of many": lambda rank: {"a": [large(0), large(1)], "m": {"w": large(rank == 2)}, "z": torch.ones(rank + 1)},
}  # fmt: skip


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_large_plain_tensor_that_differs_is_an_error_with_its_key_and_two_ranks(difference, tmp_path):
    error = saved(tmp_path, DIFFERENT[difference])
    assert error is not None
    assert "m.w:" in error or "m.0.w:" in error
    assert "rank 0" in error
    assert "rank 2" in error
    assert "ShardedTensor" in error


def by_rows(matrix):
    return matrix


def by_columns(matrix):
    return matrix.t().contiguous().t()


SAME = {
    "equal ones": lambda rank: {"w": large(0)},
    "equal ones with other strides": lambda rank: {"w": (by_rows, by_columns)[rank % 2](large(0).view(128, 128))},
    "not a number": lambda rank: {"w": torch.full((LARGE,), float("nan"))},
    "small ones that differ": lambda rank: {"random": large(rank, count=LARGE // 4 - 1), "w": large(0)},
    "plain values of rank 0 alone": lambda rank: {} if rank else {"w": large(0)},
    "one that another rank lacks": lambda rank: {"v": large(1)} | ({} if rank == 1 else {"w": large(0)}),
    "small ones of rank 2 alone": lambda rank: {"v": torch.ones(3)} if rank == 2 else {},
    "numbers that differ": lambda rank: {"w": large(0), "seconds": 1.5 * rank, "host": f"host {rank}"},
    "a parameter and its values": lambda rank: {"w": torch.nn.Parameter(large(0)) if rank else large(0)},
}  # fmt: skip


@pytest.mark.parametrize("kind", SAME)
def test_what_is_the_same_or_small_is_saved_as_before(kind, tmp_path):
    assert saved(tmp_path, SAME[kind]) is None


def test_large_tensors_may_differ_under_megatrons_paths(tmp_path):
    def on(group):
        with meet("save", group):
            serialization.save({"w": large(group.rank)}, tmp_path / "checkpoint")

    run_ranks(2, on)
    assert torch.equal(load({}, tmp_path / "checkpoint")["w"], large(0))


def test_a_rank_that_cannot_write_is_named_while_others_compare_large_tensors(tmp_path):
    def state_of(rank):
        return {"t": replace(tensor_entry, replica_id=rank), "w": torch.zeros(8 << 20)}

    tensor_entry = ShardedTensor.from_rank_offsets("t", torch.ones(4))
    tensor_entry.data = None
    error = saved(tmp_path, state_of, size=2)
    assert "t: a tensor that is saved must have data" in error


def test_states_of_fsdp_are_loaded_as_they_were_and_parts_at_other_places_are_refused(tmp_path):
    for outcomes in run_fsdp(tmp_path):
        assert outcomes == dict.fromkeys(outcomes, True)
        assert len(outcomes) >= 7
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, collections.OrderedDict])
def test_a_part_in_an_attribute_that_is_pickled_is_refused(kind, tmp_path):
    value = kind() if kind is collections.OrderedDict else kind(torch.zeros(3))
    value.more = part_of(Part)
    with pytest.raises(CheckpointError, match=r"a\.x\.more: a plain value must be whole"):
        save({"a": types.SimpleNamespace(x=value)}, tmp_path / "checkpoint", group=SOLO)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_are_compared_by_their_tensors(tmp_path):
    def state(rank, kind):
        return {"a": torch.nested.nested_tensor([large(rank), large(1)], layout=kind)}

    for kind in (torch.strided, torch.jagged):
        for differs in (False, True):
            folder = tmp_path / f"{kind} {differs}"
            folder.mkdir()
            error = saved(folder, lambda rank, kind=kind, differs=differs: state(rank * differs, kind), size=2)
            assert (error is not None) == differs
            assert error is None or "rank 0 and rank 1 differ" in error
