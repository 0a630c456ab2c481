"""The names of `trackbed` itself, on one rank and on several."""

import json
import pickle
import subprocess
import sys
import typing
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

import trackbed
from tests.support.files.built_pair import build
from tests.support.processes.launching import run_script
from trackbed.errors import ArgumentError, BlendFileError
from trackbed.tokens import IndexedDataset

BLEND = """version = 1
sequence_length = 16
split = "90,10"
tokenizer = "bytes"
cache = "cache"
size = {train = 100, valid = 10}

[[dataset]]
path = "a"
weight = 0.7

[[dataset]]
path = "b"
weight = 0.3
"""
RANK = """
import json, os, sys
import trackbed

splits = trackbed.open_blend("blend.toml")
loader = trackbed.BatchLoader(splits.train, batch_size=2)
if len(sys.argv) > 1:
    loader.load_state_dict(json.loads(sys.argv[1]))
for number, batch in enumerate(loader, 1):
    if number == 5:
        break
print(json.dumps({"tokens": batch["tokens"].tolist(), "state": loader.state_dict()}))
if "RANK" in os.environ:
    import torch.distributed as dist

    dist.init_process_group("gloo")  # at the port that open_blend has used
    again = trackbed.BatchLoader(trackbed.open_blend("blend.toml").valid, batch_size=1)
    assert len(again) == 10 // dist.get_world_size()
    dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for seed, name in enumerate("ab"):
        rng = np.random.default_rng(seed)
        build(tmp_path / name, [rng.integers(0, 256, size).tolist() for size in rng.integers(0, 40, 300)], np.uint16)
    (tmp_path / "blend.toml").write_text(BLEND)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_prefixes(**changes):
    asked = {"prefixes": {"a": 0.7, "b": 0.3}, "sequence_length": 16, "split": "90,10", "tokenizer": "bytes"}
    return trackbed.open_blend(**{**asked, "size": {"train": 100, "valid": 10}, "cache": "cache", **changes})


def test_a_blend_file_and_its_keys_give_the_same_datasets(folder):
    first, second = trackbed.open_blend("blend.toml"), of_prefixes()
    assert first.train.fingerprint == second.train.fingerprint
    assert (len(first.train), len(first.valid)) == (100, 10)
    assert first.valid[3]["tokens"].tolist() == second.valid[3]["tokens"].tolist()


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_seed_and_order_are_those_of_a_blend_file(folder, order):
    (folder / "other.toml").write_text(f'seed = 5\norder = "{order}"\n{BLEND}')
    wanted = trackbed.open_blend(folder / "other.toml").train
    found = of_prefixes(seed=5, order=order, prefixes={str(folder / "a"): 0.7, str(folder / "b"): 0.3}).train
    assert [found[k]["tokens"].tolist() for k in range(9)] == [wanted[k]["tokens"].tolist() for k in range(9)]


def test_a_list_of_prefixes_gives_every_sample_once(folder):
    splits = of_prefixes(prefixes=["a"], split=None, size=None)
    tokens = int(IndexedDataset("a").sequence_lengths.sum())
    assert len(splits.train) == (tokens - 1) // 16
    assert type(splits.train).__name__ == "GPTDataset"


def test_a_split_that_the_blend_lacks_is_an_error_that_names_the_others(folder):
    with pytest.raises(ArgumentError, match=r"blend.toml: the blend must have a split 'test', found 'train', 'valid'"):
        _ = trackbed.open_blend("blend.toml").test


def test_several_validation_sets_are_listed(folder):
    text = BLEND.replace('split = "90,10"\n', "").replace('path = "a"', 'path = "a"\nsplits = ["train", "valid"]')
    text = text.replace('path = "b"', 'path = "b"\nsplits = ["train", "valid"]')
    (folder / "sets.toml").write_text(f"{text}\n[options]\nmultiple_validation_sets = true\n")
    splits = trackbed.open_blend("sets.toml")
    assert [one.dataset_path for one in splits.validation_sets] == ["a", "b"]
    with pytest.raises(ArgumentError, match="split 'valid' has several datasets, which validation_sets lists"):
        _ = splits.valid
    assert trackbed.open_blend("blend.toml").validation_sets[0].split.name == "valid"


@pytest.mark.parametrize("tokenizer", ["null:299", {"eod": 1, "vocab_size": 300}])
def test_a_tokenizer_replaces_that_of_the_file(folder, tokenizer):
    assert trackbed.open_blend("blend.toml", tokenizer=tokenizer).train.config.tokenizer.vocab_size == 300


def test_an_object_replaces_the_tokenizer_of_the_file(folder):
    from trackbed.datasets import NullTokenizer

    mine = NullTokenizer(299)
    assert trackbed.open_blend("blend.toml", tokenizer=mine, cache="mine").train.config.tokenizer is mine
    assert (folder / "mine").is_dir()


def test_datasets_say_what_they_hold(folder):
    splits = trackbed.open_blend("blend.toml")
    assert repr(splits.train) == "<BlendedDataset: train, 100 samples of 16 tokens, from 70.0% a, 30.0% b>"
    assert repr(splits.train.datasets[0]).endswith("samples of 16 tokens, from a>")
    assert repr(splits).splitlines()[:2] == ["Splits of blend.toml", f"  train: {splits.train!r}"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "trackbed.open_blend: must have the path of a blend file, or prefixes, found neither"),
        (
            {"path": "blend.toml", "seed": 3, "size": 7},
            "must state these itself, found them given beside it: size, seed",
        ),
        ({"prefixes": ["a"]}, "trackbed.open_blend: sequence_length must be given"),
        (
            {"prefixes": [3], "sequence_length": 8},
            "prefixes must be paths or addresses, found one of type int",
        ),
        (
            {"prefixes": {"a": -1}, "sequence_length": 8},
            "dataset.weight must be a finite number of at least 0, found -1",
        ),
        (
            {"prefixes": {"a": 1}, "sequence_length": 8},
            "size must give the size of train, whose datasets have weights or epochs",
        ),
        ({"prefixes": ["a"], "sequence_length": 8, "order": "random"}, "order must be one of 'megatron', "),
        ({"prefixes": ["a"], "sequence_length": 8}, "trackbed.open_blend: tokenizer must be given"),
        ({"path": "blend.toml", "tokenizer": {"eod": 1}}, "vocab_size must be given"),
    ],
)
def test_wrong_arguments_are_named(folder, arguments, words):
    path = arguments.pop("path", None)
    with pytest.raises((ArgumentError, BlendFileError)) as caught:
        trackbed.open_blend(path, **arguments)
    assert words in str(caught.value)
    assert not (folder / "cache").exists()


def test_a_loader_of_too_few_samples_is_refused(folder):
    train = trackbed.open_blend("blend.toml").train
    with pytest.raises(ArgumentError, match="at least 101 samples, one step of 1 rank with batch_size 101, found 100"):
        trackbed.BatchLoader(train, batch_size=101)
    (batch,) = trackbed.BatchLoader(train, batch_size=101, drop_last=False)
    assert batch["tokens"].shape == (100, 16)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *[("batch_size", value, "a whole number of at least 1") for value in (0, 2.5, None, "8", True)],
        *[("consumed_samples", value, "a whole number of at least 0") for value in (-1, 1.5, "3", None)],
        *[("num_threads", value, "a whole number of at least 1") for value in (0, 1.5, "1")],
        *[("ahead", value, "a whole number of at least 1") for value in (0, 1.5, "a", None)],
        *[("drop_last", value, "True or False") for value in ("no", 1, None)],
    ],
)
def test_a_wrong_argument_of_a_loader_is_named(folder, name, value, wanted):
    train = trackbed.open_blend("blend.toml").train
    with pytest.raises(ArgumentError, match=f"{name} must be {wanted}, found {value!r}"):
        trackbed.BatchLoader(train, **{"batch_size": 8, name: value})


@pytest.mark.parametrize("seconds", [0, -1, "x", True, float("nan")])
def test_a_wrong_timeout_is_named(folder, seconds):
    with pytest.raises(ArgumentError, match="timeout_seconds must be a number above 0, found "):
        trackbed.open_blend("blend.toml", timeout_seconds=seconds)


def test_splits_without_test_or_with_a_wrong_name_say_so(folder):
    splits = trackbed.open_blend("blend.toml")
    assert (hasattr(splits, "valid"), hasattr(splits, "test"), getattr(splits, "test", None)) == (True, False, None)
    with pytest.raises(AttributeError, match="found 'validation'; did you mean 'valid'"):
        splits.validation  # noqa: B018
    with pytest.raises(AttributeError, match=r"found 'foo'$"):
        splits.foo  # noqa: B018
    assert len(pickle.loads(pickle.dumps(splits)).train) == 100


def test_a_loader_says_how_the_samples_are_divided(folder):
    loader = trackbed.BatchLoader(trackbed.open_blend("blend.toml").train, batch_size=8)
    assert repr(loader).startswith("<BatchLoader: 12 steps of 8 samples on 1 rank, <BlendedDataset: train, ")


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
def test_one_of_several_ranks_without_a_process_group_is_no_job_of_its_own(names, folder, monkeypatch):
    import torch

    from trackbed.comm import SOLO
    from trackbed.grads import DistributedDataParallelConfig

    for name, value in zip(names, ("0", "2"), strict=True):
        monkeypatch.setenv(name, value)
    model, config = torch.nn.Linear(2, 2), DistributedDataParallelConfig()
    words = rf"torch.distributed must be initialised on each of the 2 ranks \({names[1]}\), found it is not"
    with pytest.raises(ArgumentError, match=f"process_group: {words}"):
        trackbed.DistributedDataParallel(model, config)
    with pytest.raises(ArgumentError, match=f"save: {words}"):
        trackbed.save({"step": 1}, "checkpoint")
    assert not (folder / "checkpoint").exists()
    trackbed.DistributedDataParallel(model, config, process_group=SOLO)
    trackbed.save({"step": 1}, "checkpoint", group=SOLO)
    assert trackbed.load("checkpoint") == trackbed.load({}, "checkpoint") == {"step": 1}


def test_a_model_is_wrapped_by_one_constructor():
    import torch

    from trackbed.grads import DistributedDataParallelConfig

    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    for arguments, named in (
        ((torch.nn.Linear(2, 2),), {}),
        ((torch.nn.Linear(2, 2), config), {}),
        ((torch.nn.Linear(2, 2),), {"config": config}),
        ((torch.nn.Linear(2, 2),), {"ddp_config": config}),
        ((), {"module": torch.nn.Linear(2, 2), "config": config}),
        ((), {"module": torch.nn.Linear(2, 2), "ddp_config": config}),
    ):
        wrapped = trackbed.DistributedDataParallel(*arguments, **named)
        assert isinstance(wrapped.module, torch.nn.Linear)
        assert wrapped.ddp_config.overlap_grad_reduce == (config in (*arguments, *named.values()))
    for arguments in ((None, config), (config,), (None,)):
        with pytest.raises(ArgumentError, match=r"module must be a torch.nn.Module that is not wrapped"):
            trackbed.DistributedDataParallel(*arguments)
    with pytest.raises(TypeError, match="'module'"):
        trackbed.DistributedDataParallel()


def test_megatron_cores_form_is_an_error_that_says_where_it_went():
    import torch

    from trackbed import megatron

    config, module = megatron.DistributedDataParallelConfig(), torch.nn.Linear(2, 2)
    for arguments, named in (
        ((None, config, module), {}),
        ((object(), config, module, True), {}),
        ((None, config), {"module": module}),
        ((None,), {"ddp_config": config, "module": module}),
        ((), {"config": object(), "ddp_config": config, "module": module}),
        ((module, config), {"ddp_config": config}),
        ((module,), {"pg_collection": object()}),
    ):
        with pytest.raises(ArgumentError, match=r"use trackbed\.megatron\.DistributedDataParallel, which takes them"):
            trackbed.DistributedDataParallel(*arguments, **named)
    words = r"config must be a trackbed\.DistributedDataParallelConfig, but is of trackbed\.megatron\.ddp_config\."
    with pytest.raises(ArgumentError, match=words):
        trackbed.DistributedDataParallel(module, config)
    with pytest.raises(ArgumentError, match=r"ddp_config must be trackbed\.megatron's .* but is of trackbed\.grads\."):
        megatron.DistributedDataParallel(None, trackbed.DistributedDataParallelConfig(), module)
    assert megatron.DistributedDataParallel(None, config, module).module is module


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_loading_nothing_of_a_checkpoint_of_sharded_tensors_is_warned_of(folder, caplog):
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(3)}, checkpoint_id="dcp", no_dist=True)
    assert trackbed.load("dcp") == {}
    assert "dcp: none of its 1 sharded tensor is asked for; open_checkpoint reads them, too" in caplog.text


def test_load_takes_a_folder_or_a_state_and_a_folder(folder):
    trackbed.save({"step": 1}, "checkpoint")
    assert trackbed.load(folder / "checkpoint") == {"step": 1}
    for arguments in (({},), ("checkpoint", "checkpoint"), (None, None)):
        with pytest.raises(ArgumentError, match=r"load: must be called as load\(folder\) or"):
            trackbed.load(*arguments)


def test_a_dataset_of_another_kind_is_named(folder):
    with pytest.raises(ArgumentError, match=r"dataset must be that of a split, such as splits.train, found a Splits"):
        trackbed.BatchLoader(trackbed.open_blend("blend.toml"), batch_size=8)


def test_numbers_of_numpy_and_paths_are_taken(folder):
    numbers = {"sequence_length": np.int64(16), "seed": np.uint32(5), "size": {"train": np.int32(100), "valid": 10}}
    train = of_prefixes(prefixes={folder / "a": np.float32(0.5), folder / "b": 0.5}, **numbers).train
    assert len(trackbed.BatchLoader(train, batch_size=np.int64(8))) == 12


def test_a_loader_counts_the_batches_that_were_handed_out(folder):
    loader = trackbed.BatchLoader(trackbed.open_blend("blend.toml").train, batch_size=8)
    assert len(loader) == 12
    assert loader.state_dict()["consumed_samples"] == 0
    for number, batch in enumerate(loader, 1):
        assert batch["tokens"].shape == (8, 16)
        assert pickle.loads(pickle.dumps(loader.state_dict()))["consumed_samples"] == 8 * number


def test_ranks_that_read_different_samples_may_be_given(folder):
    train = trackbed.open_blend("blend.toml").train
    whole = next(iter(trackbed.BatchLoader(train, batch_size=4)))["tokens"].tolist()
    parts = [
        next(iter(trackbed.BatchLoader(train, batch_size=2, rank=rank, num_ranks=2)))["tokens"].tolist()
        for rank in range(2)
    ]
    assert parts == [whole[:2], whole[2:]]
    for wrong, words in (
        ({"rank": 2, "num_ranks": 2}, "rank must be below num_ranks 2, found 2"),
        ({"rank": 0}, "num_ranks must be a whole number of at least 1, found None"),
        ({"num_ranks": 2}, "rank must be a whole number of at least 0, found None"),
    ):
        with pytest.raises(ArgumentError, match=words):
            trackbed.BatchLoader(train, batch_size=2, **wrong)


def test_passes_after_one_that_was_resumed_are_whole(folder):
    train = trackbed.open_blend("blend.toml").train
    whole = [batch["tokens"].tolist() for batch in trackbed.BatchLoader(train, batch_size=8)]
    loader = trackbed.BatchLoader(train, batch_size=8)
    for number, _ in enumerate(loader, 1):
        if number == 5:
            break
    state = loader.state_dict()
    resumed = trackbed.BatchLoader(train, batch_size=8)
    resumed.load_state_dict(state)
    for one in (loader, resumed, trackbed.BatchLoader(train, batch_size=8, consumed_samples=40)):
        passes = [[batch["tokens"].tolist() for batch in one] for _ in range(3)]
        assert passes == [whole[5:], whole, whole]
    at_end = trackbed.BatchLoader(train, batch_size=8)
    at_end.load_state_dict(loader.state_dict())
    assert [len(list(at_end)) for _ in range(2)] == [12, 12]


def test_a_run_that_is_stopped_after_each_pass_reads_what_one_without_a_stop_reads(folder):
    train = trackbed.open_blend("blend.toml").train
    counts, state = [], None
    for _ in range(3):
        loader = trackbed.BatchLoader(train, batch_size=8)
        if state is not None:
            loader.load_state_dict(state)
        counts.append(len(list(loader)))
        state = loader.state_dict()
    assert counts == [12, 12, 12]


def test_a_run_in_the_order_instant_is_made_longer_after_its_end(folder):
    def train(size):
        prefixes = {"a": 1.0, "b": 1.0}
        return trackbed.open_blend(
            prefixes=prefixes, sequence_length=16, size=size, tokenizer="bytes", order="instant", seed=1
        ).train

    shorter, longer = (trackbed.BatchLoader(train(size), batch_size=8) for size in (64, 128))
    whole = [batch["tokens"].tolist() for batch in longer]
    assert [batch["tokens"].tolist() for batch in shorter] == whole[:8]
    resumed = trackbed.BatchLoader(train(128), batch_size=8)
    resumed.load_state_dict(shorter.state_dict())
    assert [batch["tokens"].tolist() for batch in resumed] == whole[8:]


@pytest.mark.parametrize(("batch_size", "drop_last", "steps"), [(8, True, 12), (9, True, 11), (9, False, 12)])
def test_a_loop_that_is_left_at_the_last_step_is_followed_by_a_whole_pass(batch_size, drop_last, steps, folder):
    train = trackbed.open_blend("blend.toml").train
    loader = trackbed.BatchLoader(train, batch_size=batch_size, drop_last=drop_last)
    for number, _ in enumerate(loader, 1):
        if number == steps:
            break
    resumed = trackbed.BatchLoader(train, batch_size=batch_size, drop_last=drop_last)
    resumed.load_state_dict(loader.state_dict())
    for one in (loader, resumed):
        assert [len(list(one)) for _ in range(2)] == [steps, steps]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefixes": {"a", "b"}}, "prefixes must be a mapping to weights, or a list, as their order matters"),
        ({"prefixes": 3}, "prefixes must be a mapping to weights, or a list"),
        ({"prefixes": ["a"], "size": {1: 2}}, "size must be a number of samples, or a mapping with keys such as"),
        ({"prefixes": ["a"], "size": "many"}, "size must be a number of samples, or a mapping with keys such as"),
        ({"prefixes": ["a"], "cache": 5}, "cache must be the path of a folder, found a int"),
    ],
)
def test_arguments_of_wrong_types_are_named(folder, arguments, words):
    with pytest.raises(ArgumentError, match=words):
        trackbed.open_blend(sequence_length=8, tokenizer="bytes", **arguments)


def test_a_loader_begins_where_another_program_has_stopped(folder):
    train = trackbed.open_blend("blend.toml").train
    batches = [batch["tokens"].tolist() for batch in trackbed.BatchLoader(train, batch_size=8)]
    later = trackbed.BatchLoader(train, batch_size=8, consumed_samples=24)
    assert next(iter(later))["tokens"].tolist() == batches[3]
    assert later.state_dict()["consumed_samples"] == 32
    with pytest.raises(ArgumentError, match=r"consumed_samples must be in \[0, total_samples = 100\), found 100"):
        trackbed.BatchLoader(train, batch_size=8, consumed_samples=100)


def test_ranks_read_what_one_rank_would_and_resume_on_another_number(folder):
    (folder / "rank.py").write_text(RANK)
    two = [found for (found,) in run_script(folder / "rank.py", 2, limit_seconds=90)]
    assert two[0]["state"] == two[1]["state"]
    assert two[0]["state"]["consumed_samples"] == 20
    loader = trackbed.BatchLoader(trackbed.open_blend("blend.toml").train, batch_size=4)
    batches = [batch["tokens"].tolist() for batch in loader]
    assert two[0]["tokens"] + two[1]["tokens"] == batches[4]
    loader.load_state_dict(two[0]["state"])
    assert next(iter(loader))["tokens"].tolist() == batches[5]
    ((one,),) = run_script(folder / "rank.py", 1, json.dumps(two[1]["state"]), limit_seconds=90)
    assert one["state"]["consumed_samples"] == 30
    assert one["tokens"] == batches[7][:2]


def test_a_pair_that_one_rank_lacks_is_named_on_every_rank(folder):
    script = (
        "import os, json, trackbed\n"
        "try:\n"
        "    name = 'a' if os.environ['RANK'] == '0' else 'c'\n"
        "    trackbed.open_blend(prefixes=[name], sequence_length=16, tokenizer='bytes')\n"
        "except Exception as error:\n"
        "    print(json.dumps(f'{type(error).__name__}: {error}'))\n"
    )
    (folder / "rank.py").write_text(script)
    (first,), (second,) = run_script(folder / "rank.py", 2, limit_seconds=90)
    assert first == second
    assert first.startswith(
        "CollectiveError: opening the blend: rank 1: BlendFileError: trackbed.open_blend: dataset.path"
    )


@pytest.mark.usefixtures("deaf_store")
def test_a_rank_that_waits_for_a_store_hears_of_the_failure_of_another(folder, bucket, monkeypatch):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "60")
    script = (
        "import os, json, time, trackbed\n"
        f"name = {bucket.text('web')!r} if os.environ['RANK'] == '0' else 'c'\n"
        "trackbed.open_blend\n"
        "started = time.monotonic()\n"
        "try:\n"
        "    trackbed.open_blend(prefixes=[name], sequence_length=16, tokenizer='bytes', cache='cache')\n"
        "except Exception as error:\n"
        "    print(json.dumps([f'{type(error).__name__}: {error}', time.monotonic() - started]))\n"
    )
    (folder / "rank.py").write_text(script)
    ((first, seconds),), ((second, _),) = run_script(folder / "rank.py", 2, limit_seconds=90)
    assert first == second
    assert first.startswith("CollectiveError: opening the blend: rank 1: BlendFileError: trackbed.open_blend: ")
    assert seconds < 20


def test_the_names_are_those_of_the_layers():
    from trackbed import checkpoint, grads, optim

    assert trackbed.DistributedDataParallel is grads.DistributedDataParallel
    assert trackbed.DataParallelOptimizer is optim.DataParallelOptimizer
    assert (trackbed.save, trackbed.load) == (checkpoint.save, checkpoint.load)
    assert trackbed.DistributedDataParallelConfig is grads.DistributedDataParallelConfig
    assert set(trackbed.__all__) < set(dir(trackbed))
    with pytest.raises(AttributeError, match="has no attribute 'open_blends'"):
        _ = trackbed.open_blends


def test_packages_are_imported_when_they_are_used():
    script = "import trackbed; print(trackbed.loading.provenance.__name__, trackbed.errors.ArgumentError.__name__)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "provenance ArgumentError\n"


def test_importing_trackbed_imports_no_torch_and_takes_no_time():
    script = (
        "import sys, time; started = time.perf_counter(); import trackbed; trackbed.__version__\n"
        "assert not {'torch', 'numpy'} & set(sys.modules); print(time.perf_counter() - started)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 0.15


def test_an_address_that_became_a_path_is_told_so():
    with pytest.raises(BlendFileError, match=r"s3:/bucket/web: .*; pass an address as a string"):
        trackbed.open_blend(prefixes=[Path("s3://bucket/web")], sequence_length=8, tokenizer="bytes")


def test_a_part_of_the_last_step_may_be_empty(folder):
    program = (
        "import json, trackbed\n"
        "valid = trackbed.open_blend('blend.toml').valid\n"
        "batches = list(trackbed.BatchLoader(valid, batch_size=8, drop_last=False))\n"
        "print(json.dumps([list(batch['tokens'].shape) for batch in batches]))\n"
    )
    (folder / "program.py").write_text(program)
    assert run_script(folder / "program.py", 3, limit_seconds=60) == [[[[8, 16]]], [[[2, 16]]], [[[0, 16]]]]


def test_annotations_can_be_read_at_run_time():
    for name in trackbed.__all__:
        found = getattr(trackbed, name)
        members = (
            [one for key, one in vars(found).items() if not key.startswith("_")] if isinstance(found, type) else []
        )
        for one in (found, *members):
            if isinstance(one, FunctionType):
                typing.get_type_hints(one)
