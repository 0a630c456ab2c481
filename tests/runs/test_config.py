"""The file of a run that `examples/pretrain_gpt.py` reads, and the data that it takes."""

import importlib
import json
import sys

import pytest

from tests.docs.pages import ROOT, snippets
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.preprocess import PreprocessConfig, preprocess

RUN = 'run = "out"\nblend = "blend.toml"\nsteps = 3\nglobal_batch_size = 4\n'


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(ROOT / "examples"))
    yield importlib.import_module("pretrain_gpt")
    sys.path.remove(str(ROOT / "examples"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('steps = "3"\n', ":1: steps must be a whole number, found steps = '3'"),
        (RUN + "micro_batch_size = 0\n", ":5: micro_batch_size must be at least 1, found micro_batch_size = 0"),
        (RUN + "step = 5\n", ":5: keys of the file must be run, blend, steps, global_batch_size"),
        (RUN + 'parallel = "tp"\n', ":5: parallel must be 'ddp' or 'fsdp2', found parallel = 'tp'"),
        (RUN + "[model]\nwidth = true\n", ":6: width must be a whole number, found width = True"),
        (RUN + "[model]\nheads = 5\n", ": width must be a multiple of heads, found 192 and 5"),
        (RUN + "model = 5\n", ":5: model must be a table, found 5"),
        (RUN + '[optimizer]\nlearning_rate = "fast"\n', ":6: learning_rate must be a number"),
        (RUN + "skip = [1, 2]\n", r":5: skip must be a list of pairs of whole numbers, found skip = [1, 2]"),
        (
            RUN.replace("size = 4", "size = [[5, 4]]"),
            ":4: global_batch_size must be at least 1, or rising pairs",
        ),
        (RUN.replace("size = 4", "size = [[0, 4], [9]]"), ":4: global_batch_size must be at least 1, or rising pairs"),
        (RUN.replace("size = 4", "size = []"), ":4: global_batch_size must be at least 1, or rising pairs"),
        (RUN.replace("size = 4", "size = 0"), ":4: global_batch_size must be at least 1, or rising pairs"),
        (RUN + "[model]\nsteps = 5\n", ":6: keys of [model] must be width, heads, layers, found steps = 5"),
        (RUN + "model.widht = 5\n", ":5: keys of [model] must be width, heads, layers, found widht = 5"),
        (RUN + "skip = [[5, 2]]\n", ":5: skip must be pairs of a first and a last position, found skip = [[5, 2]]"),
        (RUN.replace("blend.toml", "blnd.toml"), ":2: blend must be a blend file, found none"),
        (RUN.replace('"out"', '"blend.toml"'), ":1: run must be a folder, found a file"),
        ('run = "out"\n', ": must have blend, steps, global_batch_size"),
        ("run = \n", ": Invalid value (at line 1"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(example, tmp_path, text, problem):
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "blend.toml").write_text("version = 1")
    with pytest.raises(SystemExit) as refused:
        example.read_config(tmp_path / "run.toml")
    assert str(refused.value).startswith(f"{tmp_path / 'run.toml'}{problem}")


def test_a_file_that_is_not_there_is_named(example, tmp_path):
    with pytest.raises(SystemExit, match=r"No such file or directory: '.*run\.toml'"):
        example.read_config(tmp_path / "run.toml")


def test_the_keys_that_the_program_describes_can_be_given(example, tmp_path):
    shown = [line.strip() for line in example.__doc__.split("the first four are needed")[1].splitlines()]
    lines = [line for line in shown if " = " in line and line[0] != "["]
    assert len(lines) >= 11
    (tmp_path / "run.toml").write_text("\n".join(line.partition("#")[0] for line in lines))
    (tmp_path / "blend.toml").write_text("version = 1")
    assert example.read_config(tmp_path / "run.toml").skip == [[100, 199]]


@pytest.mark.parametrize(("split", "eval_every", "wanted"), [("9,1", 2, 0), ("1", 0, 0), ("1", 2, None)])
def test_one_dataset_is_enough(example, tmp_path, monkeypatch, split, eval_every, wanted):
    (tmp_path / "web.jsonl").write_text(
        "".join(json.dumps({"text": f"page {n} of many. " * 9}) + "\n" for n in range(99))
    )
    config = PreprocessConfig(inputs=(tmp_path / "web.jsonl",), output=str(tmp_path / "web"), workers=1)
    preprocess(config, ByteTokenizer())
    blend = snippets("toml", (ROOT / "README.md").read_text())[0]
    blend = (
        blend.replace('"tokenizer.json"', '"bytes"').replace("512", "32").replace('split = "1"', f'split = "{split}"')
    )
    (tmp_path / "blend.toml").write_text(blend.replace("train = 20_000", "train = 40, valid = 4"))
    sizes = "[model]\nwidth = 8\nheads = 2\nlayers = 1\n"
    (tmp_path / "run.toml").write_text(f"{RUN}eval_every = {eval_every}\n{sizes}")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", str(tmp_path / "run.toml")])
    if wanted is None:
        with pytest.raises(SystemExit, match="eval_every must be 0 for a blend without samples"):
            example.main()
    else:
        assert example.main() == wanted
        (tmp_path / "run.toml").write_text(
            f"{RUN}eval_every = {eval_every}\n{sizes}".replace("steps = 3", "steps = 30")
        )
        with pytest.raises(SystemExit, match="30 steps must have 108 more samples, found 28: give the blend a larger"):
            example.main()
        lines = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
        assert any('"evaluation"' in line for line in lines) == bool(eval_every)
