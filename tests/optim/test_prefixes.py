"""Several models, with optimizers or without, in one checkpoint."""

import pytest
import torch
from torch import nn

import trackbed
from trackbed import (
    DataParallelOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedObject,
    ShardedTensor,
)
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError
from trackbed.optim import load_sharded_state, sharded_state


def trained(seed, shape=(2, 3), group=None, **options):
    """A model and its optimizer after a step."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Linear(*shape)
    for param in module.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator))
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), process_group=group)
    optimizer = DataParallelOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1), model)
    model(torch.ones(1, shape[0])).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer=None):
    return {"model": model.state_dict(), "optimizer": optimizer and optimizer.full_state_dict()}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def saved(pairs, folder, group=None, **others):
    """Saves pairs of a model and an optimizer by prefix."""
    state = {}
    for prefix, pair in pairs.items():
        state |= sharded_state(*pair, prefix=prefix, group=group)
    trackbed.save({**state, **others}, folder, group=group)


def test_keys_and_entries_have_the_prefix(tmp_path):
    state = sharded_state(*trained(0), prefix="generator.")
    assert set(state) == {"generator.model", "generator.optimizer"}
    assert {entry.key for entry in state["generator.model"].values()} == {
        "generator.model.weight",
        "generator.model.bias",
    }
    trackbed.save(state, tmp_path / "step")
    assert set(trackbed.open_checkpoint(tmp_path / "step")) >= {
        "generator.model.weight",
        "generator.optimizer.state.exp_avg.weight",
    }


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((2, 3), (4, 5))])
@pytest.mark.parametrize("prefixes", [("generator.", "discriminator."), ("", "average."), ("a.", "a.b."), ("x", "y")])
def test_two_models_with_optimizers_are_saved_and_loaded(prefixes, shapes, tmp_path):
    pairs = {
        prefix: trained(number, shape) for number, (prefix, shape) in enumerate(zip(prefixes, shapes, strict=True))
    }
    saved(pairs, tmp_path / "step", step=5)
    for number, (prefix, shape) in enumerate(zip(prefixes, shapes, strict=True)):
        pair = trained(number + 10, shape)
        others = load_sharded_state(tmp_path / "step", *pair, prefix=prefix)
        assert same(state_of(*pair), state_of(*pairs[prefix]))
        assert others["step"] == 5
        assert f"{prefix}optimizer" not in others


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_other_ranks_in_another_configuration_load_both(size, is_sharded, tmp_path):
    def save(group):
        pairs = {"g.": trained(0, group=group, use_distributed_optimizer=True), "d.": trained(1, group=group)}
        saved(pairs, tmp_path / "step", group)
        return {prefix: state_of(*pair) for prefix, pair in pairs.items()}

    wanted = run_ranks(2, save)[0]

    def load(group):
        for prefix in ("d.", "g."):
            pair = trained(7, group=group, use_distributed_optimizer=is_sharded)
            load_sharded_state(tmp_path / "step", *pair, prefix=prefix, group=group)
            found = state_of(*pair)
            assert same(found["model"], wanted[prefix]["model"])
            assert same(found["optimizer"]["state"], wanted[prefix]["optimizer"]["state"])

    run_ranks(size, load)


def test_an_average_without_an_optimizer_and_a_part_alone_are_loaded(tmp_path):
    pair = trained(0)
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 3))
    state = {**sharded_state(*pair), **sharded_state(average, prefix="average.")}
    trackbed.save({**state, "step": 1}, tmp_path / "step")
    again = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 3))
    others = load_sharded_state(tmp_path / "step", again, prefix="average.")
    assert same(again.state_dict(), average.state_dict())
    assert others == {"step": 1}
    model = trained(1)[0]
    assert load_sharded_state(tmp_path / "step", model) == {"step": 1}
    assert same(model.state_dict(), pair[0].state_dict())


def test_torch_reads_a_model_with_a_prefix(tmp_path):
    import torch.distributed.checkpoint as dcp

    module, again = nn.Linear(2, 3), nn.Linear(2, 3)
    trackbed.save(sharded_state(module, prefix="generator."), tmp_path / "step")
    state = {"generator": {"model": again.state_dict()}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    assert same(dict(again.state_dict()), dict(module.state_dict()))


def test_another_prefix_is_refused_with_those_that_are_there(tmp_path):
    saved({"generator.": trained(0), "average.": trained(1)}, tmp_path / "step")
    for prefix, start in (("", "model"), ("g.", "g.model")):
        with pytest.raises(CheckpointError, match=rf"has no {start}\.\* tensors.*'average\.', 'generator\.'"):
            load_sharded_state(tmp_path / "step", *trained(2), prefix=prefix)
    trackbed.save(sharded_state(trained(0)[0], prefix="g."), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"must have a state of the optimizer, but has no g\.optimizer\.\* keys"):
        load_sharded_state(tmp_path / "model", *trained(2), prefix="g.")


def test_only_the_keys_of_the_prefix_are_checked(tmp_path):
    saved({"a.": trained(0), "b.": trained(1, (7, 7))}, tmp_path / "step")
    load_sharded_state(tmp_path / "step", *trained(2), prefix="a.")
    with pytest.raises(
        CheckpointError, match=r"b\.model\.weight: must have the shape|b\.model\.bias: must have the shape"
    ):
        load_sharded_state(tmp_path / "step", *trained(2), prefix="b.")
    with pytest.raises(CheckpointError, match=r"the model must have every tensor.*lacks a\.model\.bias and 1 other"):
        load_sharded_state(tmp_path / "step", nn.ReLU(), prefix="a.")


@pytest.mark.parametrize("prefix", ["model.", "a.model.", "model.a.", "model", 5, None, "\udc80."])
def test_a_prefix_that_would_be_taken_for_names_of_a_model_is_refused(prefix, tmp_path):
    with pytest.raises(CheckpointError, match=r"prefix must be text without the part 'model'|must be text that UTF-8"):
        sharded_state(nn.Linear(2, 2), prefix=prefix)
    with pytest.raises(CheckpointError, match=r"prefix must be text without the part 'model'|must be text that UTF-8"):
        load_sharded_state(tmp_path, nn.Linear(2, 2), prefix=prefix)


def test_ranks_with_different_prefixes_are_refused():
    def on(group):
        with pytest.raises(CheckpointError, match=r"'b\.'.*'a\.'"):
            sharded_state(nn.Linear(2, 2), prefix="ab"[group.rank] + ".", group=group)

    run_ranks(2, on)


def tensor(value, key="w", **fields):
    return ShardedTensor.from_rank_offsets(key, torch.full((4,), float(value)), **fields)


TWICE = {
    "two models": lambda: {
        "generator": sharded_state(nn.Linear(2, 2), group=SOLO),
        "average": sharded_state(nn.Linear(2, 2), group=SOLO),
    },
    "models of other shapes": lambda: {
        "generator": sharded_state(nn.Linear(2, 2), group=SOLO),
        "average": sharded_state(nn.Linear(3, 4), group=SOLO),
    },
    "models of other types": lambda: {
        "generator": sharded_state(nn.Linear(2, 2), group=SOLO),
        "average": sharded_state(nn.Linear(2, 2).bfloat16(), group=SOLO),
    },
}


@pytest.mark.parametrize("kind", TWICE)
def test_two_entries_of_one_key_are_named_with_their_places(kind, tmp_path):
    state = TWICE[kind]()
    with pytest.raises(CheckpointError) as caught:
        trackbed.save(state, tmp_path / "step", group=SOLO)
    error = str(caught.value)
    assert "model.weight: " in error
    assert "at generator.model.weight and " in error
    assert "at average.model.weight" in error or "and average.model.weight" in error
    assert "prefix=" in error
    trackbed.save(state["generator"], tmp_path / "step", group=SOLO)
    with pytest.raises(
        CheckpointError, match=r"generator\.model\.(weight|bias)|must have the shape|must be loaded into"
    ):
        trackbed.load(state, tmp_path / "step", group=SOLO)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (tensor(1), tensor(2), r"has 2 times \[0:4\], at a\.0 and b\.x"),
        (tensor(1), ShardedObject("w", 1, (1,), (0,)), r"a tensor of .* at a\.0 and an object of .* at b\.x"),
        (ShardedObject("w", 1, (1,), (0,)), ShardedObject("w", 2, (1,), (0,)), r"2 times \[0:1\], at a\.0 and b\.x"),
        (
            ShardedTensor("w", torch.ones(3), torch.float32, (3,), (5,), (0,), None),
            ShardedTensor("w", torch.ones(3), torch.float32, (3,), (5,), (2,), None),
            r"has 2 times \[2:3\], at a\.0 and b\.x",
        ),
    ],
)
def test_entries_that_overlap_on_one_rank_are_named_with_their_places(one, other, words, tmp_path):
    def on(group):
        state = {"a": [one], "b": {"x": other}} if group.rank == 1 else {"note": 1}
        with pytest.raises(CheckpointError, match=rf"rank 1.*w: .*rank 1 has {words.removeprefix('has ')}"):
            trackbed.save(state, tmp_path / "step", group=group)

    run_ranks(2, on)


def test_copies_and_other_boxes_of_a_key_are_saved_as_before(tmp_path):
    halves = [half(value) for value in (0, 1)]
    state = {
        "a": tensor(1),
        "b": tensor(1, replica_id=1),
        "halves": halves,
        "again": [tensor(3, "c"), tensor(3, "c", replica_id=2)],
    }
    trackbed.save(state, tmp_path / "step", group=SOLO)
    assert trackbed.open_checkpoint(tmp_path / "step")["h"][...].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def half(number):
    return ShardedTensor.from_rank_offsets("h", torch.full((4,), float(number)), (0, number, 2))
