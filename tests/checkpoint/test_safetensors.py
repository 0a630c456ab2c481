"""Models exported as safetensors, read from there into any sharding, and made checkpoints of."""

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import trackbed
from tests.support.processes.launching import run_script
from trackbed.checkpoint.damage import find_damage
from trackbed.checkpoint.export import export_model, import_model
from trackbed.checkpoint.format.safetensors_files import NAMES, read_header
from trackbed.cli.main import trackbed as command_line
from trackbed.comm import SOLO
from trackbed.errors import ArgumentError, CheckpointError

MIB = 1 << 20


def filled(shape, dtype):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape) % 61
    return (numbers * (1 + 2j) if dtype.is_complex else numbers).to(dtype)


def entry(key, value):
    return trackbed.ShardedTensor.from_rank_offsets(key, value)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def bits(value):
    return value.contiguous().reshape(-1).view(torch.uint8)


def test_all_types_and_shapes_are_those_that_the_library_reads(tmp_path):
    state = {f"model.{dtype}": filled((3, 5), dtype) for dtype in NAMES}
    state |= {"model.scalar": torch.tensor(2.5), "model.empty": torch.empty(0, 4), "model.one": torch.ones(1)}
    trackbed.save({key: entry(key, value) for key, value in state.items()}, tmp_path / "saved", group=SOLO)
    export_model(tmp_path / "saved", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {key.removeprefix("model.") for key in state}
    assert all(same(found[key.removeprefix("model.")], value) for key, value in state.items())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    opened = trackbed.open_checkpoint(tmp_path / "out")
    assert all(same(opened[key.removeprefix("model.")][...], value) for key, value in state.items())


def test_a_model_is_written_in_several_files_under_other_names_and_in_another_type(tmp_path):
    names = [f"layer{number}.weight" for number in range(6)]
    state = {f"model.{name}": filled((40, 25), torch.float32) + number for number, name in enumerate(names)}
    state["model.count"] = torch.tensor(3)
    state["optimizer.state.exp_avg.layer0.weight"] = torch.ones(3)
    trackbed.save({key: entry(key, value) for key, value in state.items()}, tmp_path / "saved", group=SOLO)
    (tmp_path / "names.json").write_text(json.dumps({"layer0.weight": "a"}))
    arguments = ["--dtype", "bf16", "--rename", str(tmp_path / "names.json"), "--shard-size", "5kB"]
    arguments = ["ckpt", "export", str(tmp_path / "saved"), str(tmp_path / "out"), *arguments]
    assert CliRunner().invoke(command_line, arguments).exit_code == 2  # kB is no unit
    arguments[-1] = "5KB"
    done = CliRunner().invoke(command_line, arguments)
    assert (done.exit_code, "7 tensors, 12,008 bytes" in done.output) == (0, True), done.output
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 12_008
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        found |= load_file(tmp_path / "out" / name)
    assert found.keys() == index["weight_map"].keys() == {"a", "count", *names[1:]}
    assert same(found["a"], state["model.layer0.weight"].bfloat16())
    assert same(found["count"], torch.tensor(3))
    request = {f"model.{name}": entry(f"model.{name}", torch.zeros(40, 25)) for name in names[1:]}
    loaded = trackbed.load(request, tmp_path / "out", rename=lambda key: key.removeprefix("model."), group=SOLO)
    assert all(torch.equal(loaded[key].data, state[key].bfloat16().float()) for key in request)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_of_tied_weights_the_first_name_is_written_and_both_are_loaded(tmp_path):
    module = Tied()
    trackbed.save(trackbed.sharded_state(module, group=SOLO), tmp_path / "saved", group=SOLO)
    export_model(tmp_path / "saved", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"embedding.weight"}
    other = Tied()
    trackbed.load_sharded_state(tmp_path / "out", other, group=SOLO)
    assert torch.equal(other.head.weight, module.embedding.weight)


def test_a_small_llama_is_read_by_transformers_and_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    trackbed.save(trackbed.sharded_state(model, group=SOLO), tmp_path / "saved", group=SOLO)
    export_model(tmp_path / "saved", tmp_path / "out", file_bytes=4096)
    config.save_pretrained(tmp_path / "out")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert all(same(value, model.state_dict()[name]) for name, value in read.state_dict().items())
    model.save_pretrained(tmp_path / "theirs")
    torch.manual_seed(2)
    other = transformers.LlamaForCausalLM(config)
    trackbed.load_sharded_state(tmp_path / "theirs", other, group=SOLO)
    assert all(same(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    import_model(tmp_path / "theirs", tmp_path / "imported")
    torch.manual_seed(3)
    other = transformers.LlamaForCausalLM(config)
    trackbed.load_sharded_state(tmp_path / "imported", other, group=SOLO)
    assert all(same(value, model.state_dict()[name]) for name, value in other.state_dict().items())


def test_mistakes_are_named_and_leave_nothing(tmp_path):
    trackbed.save({"model": {"w": torch.ones(2)}}, tmp_path / "plain", group=SOLO)
    with pytest.raises(CheckpointError, match=r"must have tensors of a model, but has none. Its model is a pl"):
        export_model(tmp_path / "plain", tmp_path / "out")
    trackbed.save({"w": entry("w", torch.ones(2, dtype=torch.complex128))}, tmp_path / "saved", group=SOLO)
    with pytest.raises(CheckpointError, match=r"w: must be of a type that safetensors has, but is of torch.complex128"):
        export_model(tmp_path / "saved", tmp_path / "out")
    trackbed.save({key: entry(key, torch.ones(2)) for key in "ab"}, tmp_path / "saved", group=SOLO)
    with pytest.raises(ArgumentError, match="rename: must give each tensor a name of its own, but gives 'b' to two"):
        export_model(tmp_path / "saved", tmp_path / "out", rename={"a": "b"})
    with pytest.raises(ArgumentError, match="rename: must have names of the model, such as 'a', found 'c'"):
        export_model(tmp_path / "saved", tmp_path / "out", rename={"c": "b"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    with pytest.raises(FileExistsError):
        export_model(tmp_path / "saved", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"must have files that end in .safetensors, but has none"):
        import_model(tmp_path / "out", tmp_path / "imported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain", "saved"]


def test_options_of_an_export_are_checked_and_no_value_is_lost(tmp_path):
    state = {"a": entry("a", torch.tensor([1.0, torch.inf])), "b": entry("b", torch.tensor([1e6]))}
    trackbed.save(state, tmp_path / "saved", group=SOLO)
    for options, words in (
        ({"file_bytes": "5GB"}, "file_bytes must be an integer"),
        ({"dtype": torch.int8}, "dtype must be a type of torch of floating point"),
        ({"dtype": "bf16"}, "dtype must be a type of torch of floating point"),
        ({"rename": ["b"]}, "rename must have new names by name"),
        ({"rename": {"b": 5}}, "rename must have new names by name"),
    ):
        with pytest.raises(ArgumentError, match=words):
            export_model(tmp_path / "saved", tmp_path / "out", **options)
    with pytest.raises(CheckpointError, match=r"b: must have values of torch.float16, but has larger ones"):
        export_model(tmp_path / "saved", tmp_path / "out", dtype=torch.float16)
    export_model(tmp_path / "saved", tmp_path / "out", dtype=torch.bfloat16)
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].tolist() == [1.0, torch.inf]


def test_a_source_that_is_replaced_during_the_export_is_found(tmp_path):
    for name, value in (("saved", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        for key in "ab":
            save_file({key: torch.full((100,), value)}, tmp_path / name / f"{key}.safetensors")

    def replace(done, total):
        if done < total:
            (tmp_path / "other" / "b.safetensors").replace(tmp_path / "saved" / "b.safetensors")

    with pytest.raises(CheckpointError, match="must stay as it is during the export, but was changed or replaced"):
        export_model(tmp_path / "saved", tmp_path / "out", file_bytes=400, progress=replace)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_pipes_are_refused_and_not_waited_for(name, tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="must be a regular file, found a pipe"):
        trackbed.open_checkpoint(tmp_path)
    assert "must be a regular file, found a pipe" in next(find_damage(tmp_path))


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    trackbed.save({"w": entry("w", torch.arange(100_000.0))}, tmp_path / "saved", group=SOLO)
    (file,) = (tmp_path / "saved").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[200_000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="the checksum of the MiB"):
        export_model(tmp_path / "saved", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_an_index_that_lies_and_names_that_are_none_are_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")
    for places, words in (
        ({"a": "one.safetensors", "b": "one.safetensors"}, "says one.safetensors for b, which is in none of its files"),
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "for c, which is in none"),
        ({"a": "one.safetensors"}, None),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        if words is None:
            assert list(trackbed.open_checkpoint(tmp_path)) == ["a"]
            continue
        for call in (trackbed.open_checkpoint, lambda folder: import_model(folder, tmp_path / "out")):
            with pytest.raises(CheckpointError, match=words):
                call(tmp_path)
    trackbed.save({"__metadata__": entry("__metadata__", torch.ones(2))}, tmp_path / "saved", group=SOLO)
    with pytest.raises(ArgumentError, match="must give '__metadata__' another name"):
        export_model(tmp_path / "saved", tmp_path / "out")


BYTE = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
HEADERS = {
    "the header must have": b"\xff" * 8,
    "must be JSON": (3).to_bytes(8, "little") + b"{}}",
    "'a' is there twice": b'{"a":' + BYTE + b',"a":' + BYTE + b"}",
    "keys must be text": rb'{"\ud800":' + BYTE + b"}",
    "must begin at byte 1": b'{"a":' + BYTE + b',"b":' + BYTE + b"}",
    "must have 4 bytes, as its shape": b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,1]}}',
    "must be of a type that is known": b'{"a":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}}',
    "must have whole numbers from 0": b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}',
    "must have 1 bytes, as the file": b'{"__metadata__":{"format":"pt"}}',
    "must have dtype, shape": b'{"a":3}',
    "must be a JSON object": b"[3]     ",
    "must have a shape that torch": b'{"a":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}',
}


@pytest.mark.parametrize("words", HEADERS)
def test_damaged_headers_are_named(words, tmp_path):
    text = HEADERS[words]
    head = text if words in ("the header must have", "must be JSON") else len(text).to_bytes(8, "little") + text
    (tmp_path / "model.safetensors").write_bytes(head + b"\1")
    with pytest.raises(CheckpointError, match=f"model.safetensors: .*{words}"):
        trackbed.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 3, ""])
def test_an_index_names_files_of_its_folder_alone(name, tmp_path):
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"must name files of this folder that end in .safetensors, found"):
        trackbed.open_checkpoint(tmp_path)


@given(data=st.data())
def test_what_the_library_refuses_is_refused_and_what_it_reads_is_read(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_file({"a": torch.arange(5), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, path)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.sampled_from(b'0123456789,:{}[]" FUIab'))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(content)
    try:
        with safe_open(path, "pt") as file:
            expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no dictionary
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError):
        expected = None
    try:
        tensors, _ = read_header(path)
    except CheckpointError:
        return  # stricter: keys that are there twice, and further fields
    assert expected is not None
    assert tensors.keys() == expected.keys()


LOADS = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import trackbed

dist.init_process_group("gloo")
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 5))
fully_shard(model)
model.to_empty(device="cpu")
assert trackbed.load_sharded_state(sys.argv[1], model) == {}
sums = {name: float(value.full_tensor().double().sum()) for name, value in model.state_dict().items()}
print(json.dumps(sums), flush=True)
os._exit(0)  # torch's wrappers abort at the end of the interpreter in some runs
"""


@pytest.mark.slow
@pytest.mark.dist
def test_a_model_is_loaded_onto_ranks_by_ranges_of_its_files(tmp_path):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 5))
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "program.py").write_text(LOADS)
    found = run_script(tmp_path / "program.py", 2, tmp_path, limit_seconds=60)
    expected = {name: float(value.double().sum()) for name, value in module.state_dict().items()}
    assert [lines[0] for lines in found] == [expected] * 2


def test_a_folder_of_safetensors_is_verified_and_states_of_optimizers_are_not_exported(tmp_path):
    names = ("app.model.w", "app.optim.exp_avg.w", "other.optimizer.w")
    state = {name: entry(name, torch.arange(5.0)) for name in names}
    trackbed.save(state, tmp_path / "saved", group=SOLO)
    assert [one.name for one in export_model(tmp_path / "saved", tmp_path / "out")] == ["app.model.w"]
    assert list(find_damage(tmp_path / "out")) == []
    path = tmp_path / "out" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert len(list(find_damage(tmp_path / "out"))) == 1


MEASURED = """
import json, sys, threading
from pathlib import Path
from trackbed.checkpoint.damage import find_damage
from trackbed.checkpoint.export import export_model

def anonymous_bytes():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024

before, seen, has_ended = anonymous_bytes(), [0], threading.Event()

def watch():
    while not has_ended.wait(0.001):
        seen[0] = max(seen[0], anonymous_bytes())

thread = threading.Thread(target=watch)
thread.start()
export_model(sys.argv[1], sys.argv[2])
has_ended.set()
thread.join()
print(json.dumps([seen[0] - before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_export_takes_little_memory(tmp_path):
    state = {f"model.{number}": entry(f"model.{number}", torch.full((48 * MIB,), number + 1.0)) for number in range(3)}
    trackbed.save(state, tmp_path / "saved", group=SOLO)
    (tmp_path / "program.py").write_text(MEASURED)
    (((more,),),) = run_script(tmp_path / "program.py", 1, tmp_path / "saved", tmp_path / "out", limit_seconds=60)
    assert more < 256 * MIB
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 3 * 4 * 48 * MIB


def test_a_killed_export_leaves_nothing_under_the_name(tmp_path):
    state = {f"model.{number}": entry(f"model.{number}", torch.full((16 * MIB,), number + 1.0)) for number in range(4)}
    trackbed.save(state, tmp_path / "saved", group=SOLO)
    command = [sys.executable, "-m", "trackbed", "ckpt", "export", str(tmp_path / "saved"), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not list(tmp_path.glob("partial.*/*")):
            pass
        process.kill()
    assert not (tmp_path / "out").exists()
    subprocess.run(command, check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "saved"]
    assert float(load_file(tmp_path / "out" / "model.safetensors")["3"][0]) == 4.0
