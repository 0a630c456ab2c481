"""A checkpoint of the model and the optimizer that all ranks write together continues on any number of ranks."""

import copy
import itertools
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import trackbed
from tests.support.models.data_parallel import RATE, WAYS, Case, new_model, run_steps, wrap
from tests.support.tiers import slow_but
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer, load_sharded_state, sharded_state

BEFORE, STEPS = 3, 6
SHARDED = WAYS["sharded, overlap, many buckets"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def case_of(dtype=torch.float32, options=SHARDED, num_micro=2):
    return Case(dtype, num_micro=num_micro, options={**options, "grad_reduce_in_fp32": True}, steps=STEPS)


def save(group, folder, wrapper, optimizer, **others):
    trackbed.save({**sharded_state(wrapper, optimizer), **others}, folder, group=group)


def started(folder, size, case):
    """Trains the first steps and saves. Returns the full state."""

    def run(group):
        wrapper, optimizer = wrap(group, case)
        run_steps(wrapper, optimizer, case, 0, BEFORE)
        save(group, folder, wrapper, optimizer, step=BEFORE)
        return copy.deepcopy({"model": wrapper.state_dict(), "optimizer": optimizer.full_state_dict()})

    return run_ranks(size, run)[0]


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "way", "size"),
    slow_but(
        # Each way with both types, and two numbers of ranks.
        [
            (dtype, way, 1 + (2 * kind + number) % 4)
            for kind, dtype in enumerate(DTYPES)
            for number, way in enumerate(WAYS)
        ],
        itertools.product(DTYPES, WAYS, [1, 2, 3, 4]),
        [f"dtype{kind}-{way}-{size}" for kind in range(2) for way in WAYS for size in (1, 2, 3, 4)],
    ),
)
def test_what_two_ranks_save_is_loaded_in_any_layout(dtype, way, size, tmp_path):
    wanted = started(tmp_path / "saved", 2, case_of(dtype))

    def run(group):
        wrapper, optimizer = wrap(group, case_of(dtype, WAYS[way]))
        others = load_sharded_state(tmp_path / "saved", wrapper, optimizer, group=group)
        assert others == {"step": BEFORE}
        assert same({"model": wrapper.state_dict(), "optimizer": optimizer.full_state_dict()}, wanted)

    run_ranks(size, run)


@pytest.mark.parametrize("way", WAYS)
def test_any_layout_saves_what_two_ranks_load(way, tmp_path):
    wanted = started(tmp_path / "saved", 3, case_of(torch.bfloat16, WAYS[way]))

    def run(group):
        wrapper, optimizer = wrap(group, case_of(torch.bfloat16))
        load_sharded_state(tmp_path / "saved", wrapper, optimizer, group=group)
        assert same({"model": wrapper.state_dict(), "optimizer": optimizer.full_state_dict()}, wanted)

    run_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_as_if_it_had_not_stopped(dtype, tmp_path):
    def run(group, stops):
        case = case_of(dtype)
        wrapper, optimizer = wrap(group, case)
        run_steps(wrapper, optimizer, case, 0, BEFORE)
        if stops:
            save(group, tmp_path / "saved", wrapper, optimizer)
            wrapper, optimizer = wrap(group, case)
            load_sharded_state(tmp_path / "saved", wrapper, optimizer, group=group)
        run_steps(wrapper, optimizer, case, BEFORE, STEPS)
        return copy.deepcopy([wrapper.state_dict(), optimizer.full_state_dict()])

    (without, *_), (with_stop, *_) = (run_ranks(2, lambda group, s=stops: run(group, s)) for stops in (False, True))
    assert same(without[0], with_stop[0])
    assert same(without[1], with_stop[1])


def test_each_rank_writes_its_part_of_the_optimizer(tmp_path):
    def run(group):
        wrapper, optimizer = wrap(group, case_of())
        run_steps(wrapper, optimizer, case_of(), 0, 1)
        state = sharded_state(wrapper, optimizer)
        states = [one["exp_avg"] for one in state["optimizer"]["state"].values() if "exp_avg" in one]
        averages = [entry.data for boxes in states for entry in boxes.values()]
        states = optimizer.optimizer.state.values()
        own = {value.untyped_storage().data_ptr() for one in states for value in one.values()}
        assert {average.untyped_storage().data_ptr() for average in averages} <= own
        return sum(average.numel() for average in averages)

    counts = run_ranks(2, run)
    assert sum(counts) == sum(param.numel() for param in new_model().parameters() if param.requires_grad)
    assert min(counts) > max(counts) / 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it(tmp_path):
    wanted = started(tmp_path / "saved", 2, case_of())
    found = {"model.first.weight": torch.empty(50, 24), "optimizer.state.exp_avg.first.weight": torch.empty(50, 24)}
    dcp.load(found, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert torch.equal(found["model.first.weight"], wanted["model"]["first.weight"])
    average = wanted["optimizer"]["state"]["first.weight"]["exp_avg"]
    assert torch.equal(found["optimizer.state.exp_avg.first.weight"], average)


class Mixed(nn.Module):
    """Layers with buffers, a tensor without axes, one in another memory format, an empty one, and other state."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.note = "none"
        self.to(memory_format=torch.channels_last)

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]

    def forward(self, images):
        return self.scale * self.norm(self.convolution(images))


def wrapped(group, module, kind=torch.optim.AdamW, loss_scale=None, **arguments):
    config = DistributedDataParallelConfig(**{**SHARDED, "bucket_size": 50})
    wrapper = DistributedDataParallel(module, config, process_group=group, **arguments)
    trained = [param for param in module.parameters() if param.requires_grad]
    keywords = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return wrapper, DataParallelOptimizer(kind(trained, lr=RATE, **keywords), wrapper, loss_scale=loss_scale)


def step_of(wrapper, optimizer):
    optimizer.zero_grad()
    wrapper(torch.ones(2, 3, 5, 5)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("steps", [0, 2])
def test_buffers_other_state_and_any_optimizer_are_kept(kind, steps, tmp_path):
    first = Mixed()

    def run(group):
        module = copy.deepcopy(first)
        wrapper, optimizer = wrapped(group, module, kind, allow_unused=True)
        for _ in range(steps):
            step_of(wrapper, optimizer)
        module.note = f"after {steps}"
        save(group, tmp_path / "saved", wrapper, optimizer)
        fresh = Mixed()
        wrapper2, optimizer2 = wrapped(group, fresh, kind)
        assert load_sharded_state(tmp_path / "saved", wrapper2, optimizer2, group=group) == {}
        assert same(wrapper.state_dict(), wrapper2.state_dict())
        assert same(optimizer.full_state_dict(), optimizer2.full_state_dict())
        assert fresh.note == f"after {steps}"

    run_ranks(2, run)


def frozen(module, *, is_frozen):
    module.convolution.requires_grad_(not is_frozen)
    return module


@pytest.mark.parametrize("later", [False, True])
def test_the_state_of_frozen_parameters_is_kept_until_they_are_trained_again(later, tmp_path):
    """A parameter is trained when saved and frozen when loaded, is saved again, and is trained at last."""

    def adamw(module):
        return torch.optim.AdamW(module.parameters(), lr=RATE)

    first = Mixed()

    def run(group):
        config = DistributedDataParallelConfig(**{**SHARDED, "bucket_size": 50})
        states = []
        for number, is_frozen in enumerate((False, True, *([True] if later else []), False)):
            module = frozen(copy.deepcopy(first), is_frozen=is_frozen)
            wrapper = DistributedDataParallel(module, config, process_group=group, allow_unused=True)
            optimizer = DataParallelOptimizer(adamw(module), wrapper)
            if number == 0:
                step_of(wrapper, optimizer)
            else:
                load_sharded_state(tmp_path / f"saved{number - 1}", wrapper, optimizer, group=group)
            save(group, tmp_path / f"saved{number}", wrapper, optimizer)
            states.append(copy.deepcopy(optimizer.full_state_dict()))
        for state in states[1:]:
            assert same(state, states[0])

    run_ranks(2, run)


def test_a_dynamic_loss_scale_and_options_are_kept(tmp_path):
    wrapper, optimizer = wrapped(SOLO, Mixed(), loss_scale="dynamic", allow_unused=True)
    optimizer.param_groups[0]["lr"] = 0.25
    for _ in range(2):
        optimizer.zero_grad()
        (wrapper(torch.ones(2, 3, 5, 5)).square().mean() * float("inf")).backward()
        optimizer.step()
    save(SOLO, tmp_path / "saved", wrapper, optimizer)
    fresh, other = wrapped(SOLO, Mixed(), loss_scale="dynamic")
    assert other.loss_scale != optimizer.loss_scale
    load_sharded_state(tmp_path / "saved", fresh, other, group=SOLO)
    assert (other.loss_scale, other.param_groups[0]["lr"]) == (optimizer.loss_scale, 0.25)


def test_an_optimizer_that_is_not_loaded_leaves_no_state_without_tensors(tmp_path):
    wrapper, optimizer = wrapped(SOLO, Mixed(), allow_unused=True)
    wrapper(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    state = {**sharded_state(wrapper, optimizer), "other": optimizer.full_state_dict(), "epoch": 3}
    trackbed.save(state, tmp_path / "saved", group=SOLO)
    others = load_sharded_state(tmp_path / "saved", Mixed(), group=SOLO)
    assert others.keys() == {"other", "epoch"}
    assert same(others["other"]["state"], state["other"]["state"])


def test_the_model_alone_and_a_module_without_a_wrapper(tmp_path):
    module = Mixed()
    trackbed.save({**sharded_state(module), "epoch": 3}, tmp_path / "saved", group=SOLO)
    wrapper, optimizer = wrapped(SOLO, Mixed())
    assert load_sharded_state(tmp_path / "saved", wrapper, group=SOLO) == {"epoch": 3}
    assert same(dict(module.state_dict()), dict(wrapper.state_dict()))
    with pytest.raises(CheckpointError, match=r"must have a state of the optimizer, but has no optimizer\.\* keys"):
        load_sharded_state(tmp_path / "saved", wrapper, optimizer, group=SOLO)
    full = {"model": module.state_dict(), "optimizer": optimizer.full_state_dict()}
    trackbed.save(full, tmp_path / "full", group=SOLO)
    with pytest.raises(
        CheckpointError, match=r"full: must be a checkpoint of sharded_state, .* trackbed.open_checkpoint reads them"
    ):
        load_sharded_state(tmp_path / "full", wrapper, optimizer, group=SOLO)


def small(*sizes):
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


OTHERS = {
    "another shape": (
        lambda: small(4, 5, 3),
        {},
        r"model\.0\.weight: must have the shape \(5, 4\) that is wanted, but",
    ),
    "another layer": (
        lambda: small(4, 4, 4, 4),
        {},
        r"must have every tensor of the model, but lacks model\.2\.bias and 1 other",
    ),
    "a layer less": (
        lambda: small(4, 4),
        {},
        r"the model must have every tensor of the checkpoint, but lacks model\.1\.bias and",
    ),
    "another type": (lambda: small(4, 4, 4).half(), {}, r"pass allow_cast=True to round them"),
    "another optimizer": (
        lambda: small(4, 4, 4),
        {"kind": torch.optim.SGD},
        "must have a number for 'momentum', but has none",
    ),
}


@pytest.mark.parametrize("fails", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("name", OTHERS)
def test_another_model_or_optimizer_is_refused_by_every_rank_and_nothing_is_loaded(name, fails, tmp_path):
    make, options, words = OTHERS[name]
    first = small(4, 4, 4)

    def run(group):
        wrapper, optimizer = wrapped(group, copy.deepcopy(first))
        optimizer.zero_grad()
        wrapper(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        save(group, tmp_path / "saved", wrapper, optimizer)
        module, its = (make(), options) if group.rank in fails else (small(4, 4, 4), {})
        wrapper, optimizer = wrapped(SOLO, module, **its)
        before = copy.deepcopy([wrapper.state_dict(), optimizer.full_state_dict()])
        with pytest.raises(CheckpointError, match=f"load_sharded_state: rank [01].*: .*{words}"):
            load_sharded_state(tmp_path / "saved", wrapper, optimizer, group=group)
        return before, [wrapper.state_dict(), optimizer.full_state_dict()]

    for before, after in run_ranks(2, run):
        assert all(map(same, before, after))


def test_types_are_cast_on_request(tmp_path):
    wrapper, optimizer = wrapped(SOLO, small(4, 4))
    save(SOLO, tmp_path / "saved", wrapper, optimizer)
    wrapper, optimizer = wrapped(SOLO, small(4, 4).bfloat16())
    load_sharded_state(tmp_path / "saved", wrapper, optimizer, allow_cast=True, group=SOLO)


def test_arguments_are_checked():
    wrapper, optimizer = wrapped(SOLO, small(4, 4))
    other, _ = wrapped(SOLO, small(4, 4))
    adamw = torch.optim.AdamW(small(4, 4).parameters())
    cases = [
        ((other, optimizer), "optimizer must be that of the model, but was made for another one"),
        ((wrapper.module, optimizer), "optimizer must be that of the model"),
        ((wrapper, adamw), "optimizer must have parameters of the model alone, but number 0, of shape"),
        (
            (wrapper, object()),
            "optimizer must be a DataParallelOptimizer, or one of torch or a list of these, but",
        ),
        (({}, None), "model must be a module of torch, but is of dict"),
    ]
    for arguments, words in cases:
        with pytest.raises(CheckpointError, match=f"sharded_state: rank 0: .*{words}"):
            sharded_state(*arguments)
        with pytest.raises(CheckpointError, match=f"load_sharded_state: rank 0: .*{words}"):
            load_sharded_state("none", *arguments)


def test_ranks_with_other_experts_are_refused():
    def run(group):
        module = small(4, 4, 4)
        for param in module[1].parameters():
            param.allreduce = False
        wrapper, optimizer = wrapped(group, module, expert_process_group=SOLO)
        with pytest.raises(CheckpointError, match="all ranks must have the same experts, but 1 of 2 ranks share them"):
            sharded_state(wrapper, optimizer)

    run_ranks(2, run)


@pytest.mark.parametrize(
    "divided", [{"0.weight": {"exp_avg": "nothing"}}, {"0.weight": {"exp_avg": 3}}, {"0.weight": 3}, 3]
)
def test_a_damaged_description_is_refused(divided, tmp_path):
    wrapper, optimizer = wrapped(SOLO, small(4, 4))
    state = sharded_state(wrapper, optimizer)
    state["optimizer"]["divided"] = divided
    trackbed.save(state, tmp_path / "saved", group=SOLO)
    with pytest.raises(CheckpointError, match=r"load_sharded_state: rank 0: .*must"):
        load_sharded_state(tmp_path / "saved", wrapper, optimizer, group=SOLO)


def test_texts_say_what_objects_are(tmp_path):
    wrapper, optimizer = wrapped(SOLO, small(4, 4))
    save(SOLO, tmp_path / "step-1", wrapper, optimizer)
    checkpoint = trackbed.open_checkpoint(tmp_path / "step-1")
    assert repr(checkpoint) == f"<Checkpoint {tmp_path / 'step-1'}: 2 tensors, 0 objects>"
    assert repr(checkpoint["model.0.bias"]) == "<TensorReader of model.0.bias: [4], torch.float32>"
    assert "DataParallelOptimizer, sharded, max_norm=None" in repr(optimizer)
    with pytest.raises(CheckpointError, match=r"there is none; step-1 in it is one"):
        trackbed.open_checkpoint(tmp_path)


def test_buffers_are_those_of_rank_0(tmp_path):
    module = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(5)))

    def run(group):
        own = copy.deepcopy(module)
        for buffer in own.buffers():
            buffer.fill_(group.rank)
        wrapper, optimizer = wrapped(group, own)
        save(group, tmp_path / "saved", wrapper, optimizer)
        for buffer in own.buffers():
            buffer.fill_(7)
        load_sharded_state(tmp_path / "saved", wrapper, optimizer, group=group)
        assert {float(number) for buffer in own.buffers() for number in buffer.flatten()} == {0.0}

    run_ranks(3, run)


@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize("what", ["another model", "no optimizer"])
def test_a_wrong_argument_of_one_rank_is_raised_by_all(what, call, tmp_path):
    words = {
        "another model": "sharded_state: rank 1: ArgumentError: optimizer must be that of the model",
        "no optimizer": "sharded_state.*with an optimizer",
    }[what]
    module = small(4, 4)

    def run(group):
        wrapper, optimizer = wrapped(group, copy.deepcopy(module))
        _, other = wrapped(group, copy.deepcopy(module))
        save(group, tmp_path / "saved", wrapper, optimizer)
        given = optimizer if group.rank == 0 else other if what == "another model" else None
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=words):
            sharded_state(wrapper, given) if call == "save" else load_sharded_state(tmp_path / "saved", wrapper, given)
        return time.monotonic() - began

    assert max(run_ranks(2, run)) < 5


def test_what_the_next_step_would_refuse_is_not_saved_or_loaded(tmp_path):
    wrapper, optimizer = wrapped(SOLO, small(4, 4, 4))
    save(SOLO, tmp_path / "saved", wrapper, optimizer)
    newer = DataParallelOptimizer(torch.optim.AdamW(wrapper.parameters()), wrapper)
    calls = (sharded_state, lambda *arguments: load_sharded_state(tmp_path / "saved", *arguments))
    for call in calls:
        with pytest.raises(CheckpointError, match="the optimizer must be the last one of the model, but is another"):
            call(wrapper, optimizer)
    again, last = wrapped(SOLO, wrapper.module)
    for call in calls:
        with pytest.raises(CheckpointError, match="its model was wrapped again"):
            call(wrapper, newer)
    again.module[1].weight = nn.Parameter(torch.zeros(4, 4))
    for call in calls:
        with pytest.raises(CheckpointError, match=r"1\.weight"):
            call(again, last)


class Noted(nn.Linear):
    """A layer with other state than tensors."""

    def get_extra_state(self):
        return {"note": 1}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(("saved", "loaded"), [(nn.Linear, Noted), (Noted, nn.Linear)])
def test_a_model_with_other_values_is_refused_and_nothing_is_loaded(saved, loaded, tmp_path):
    wrapper, optimizer = wrapped(SOLO, saved(4, 4))
    save(SOLO, tmp_path / "saved", wrapper, optimizer)
    wrapper, optimizer = wrapped(SOLO, loaded(4, 4))
    before = copy.deepcopy(wrapper.state_dict())
    with pytest.raises(CheckpointError, match=r"lacks model\._extra_state"):
        load_sharded_state(tmp_path / "saved", wrapper, optimizer)
    assert same(before, wrapper.state_dict())


def test_a_state_beside_the_model_is_returned(tmp_path):
    module = small(4, 4)
    adamw = torch.optim.AdamW(module.parameters())
    trackbed.save({**sharded_state(module), "optimizer": adamw.state_dict(), "step": 3}, tmp_path / "saved")
    assert load_sharded_state(tmp_path / "saved", module) == {"optimizer": adamw.state_dict(), "step": 3}


def test_the_complete_state_is_saved_as_plain_values(tmp_path):
    module = small(4, 4)

    def run(group):
        wrapper, optimizer = wrapped(group, copy.deepcopy(module))
        state = {"model": wrapper.state_dict(), "optimizer": optimizer.state_dict()}
        trackbed.save(state, tmp_path / "saved", group=group)
        optimizer.load_state_dict(trackbed.load(tmp_path / "saved", group=group)["optimizer"])

    run_ranks(2, run)
