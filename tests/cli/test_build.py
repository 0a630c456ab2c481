import json
import os
import socket
import subprocess
import sys

import pytest

from blends import write_pairs

BLEND = """\
version = 1
sequence_length = 16
split = "8,1,1"
cache = "cache"
[size]
train = 300
valid = 5
test = 5
[tokenizer]
eod = 100
vocab_size = 101
[[dataset]]
path = "pair0"
weight = 0.5
[[dataset]]
glob = "pair[12]"
weight = 0.5
"""
IDENTITY = json.dumps({"class": "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText", "path": "x"})


@pytest.fixture
def blend(tmp_path):
    """A blend of pair0, pair1 and pair2 in the folder that commands run in."""
    write_pairs(tmp_path)
    (tmp_path / "blend.toml").write_text(BLEND)
    return tmp_path


def stamps(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_indices_are_built_once(run, blend):
    found = run("build", "blend.toml")
    assert found.exit_code == 0, found.stderr
    assert found.stdout.startswith("indices are in cache, after ")
    assert "samples: train 30" in found.stdout
    built = stamps(blend / "cache")
    assert sum(name.endswith(".npy") for name in built) == 3 * 9 + 2 * 3
    assert run("build", "blend.toml").exit_code == 0
    assert stamps(blend / "cache") == built


def test_a_plan_builds_nothing(run, blend):
    found = run("build", "blend.toml", "--plan", "--ranks", "4", "--threads", "2")
    assert found.exit_code == 0, found.stderr
    assert "12 indices to build, 3 of them of blends, by 4 processes of 2 threads" in found.stdout
    assert "predicted: " in found.stdout
    assert not (blend / "cache").exists()
    assert run("build", "blend.toml").exit_code == 0
    assert "nothing to build" in run("build", "blend.toml", "--plan").stdout


def test_a_plan_is_made_where_blends_take_whole_datasets(run, blend):
    text = BLEND.replace("weight = 0.5\n", "").replace("train = 300\nvalid = 5\ntest = 5\n", "").replace("[size]\n", "")
    (blend / "whole.toml").write_text(text)
    assert "9 indices to build, 0 of them of blends" in run("build", "whole.toml", "--plan").stdout
    found = run("build", "whole.toml")
    assert found.exit_code == 0, found.stderr
    assert "nothing to build" in run("build", "whole.toml", "--plan").stdout


def test_megatron_core_starts_from_them(run, blend):
    found = run(
        "build", "blend.toml", "--for", "megatron-core", "--tokenizer-identity", IDENTITY,
        "--check-against", "megatron-core",
    )  # fmt: skip
    assert found.exit_code == 0, found.stderr
    assert "builds nothing" in found.stdout


def test_an_index_that_megatron_core_builds_itself_is_an_error(run, blend, monkeypatch):
    from trackbed.cli import build, check_against

    real = check_against.check_against_megatron

    def other_seed(config, sizes):
        config.random_seed += 1
        real(config, sizes)

    monkeypatch.setattr(check_against, "check_against_megatron", other_seed)
    found = run("build", "blend.toml", "--tokenizer-identity", IDENTITY, "--check-against", "megatron-core")
    assert found.exit_code == 1
    assert "megatron-core must find every index, but it built" in found.stderr
    assert build is not None


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ('cache = "cache"\n', [], "cache must name a folder for the indices, found none"),
        ("", ["--for", "megatron-core"], "must say what the job calls its tokenizer"),
        ("", ["--ranks", "2"], "--ranks needs --plan"),
        ("", ["--tokenizer-identity", "{}"], "must be JSON like"),
        ("", ["--tokenizer-identity", "[1]"], "must be JSON like"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(run, blend, change, options, words):
    (blend / "blend.toml").write_text(BLEND.replace(change, "") if change else BLEND)
    found = run("build", "blend.toml", *options)
    assert found.exit_code in (1, 2)
    assert words in found.stderr
    assert not (blend / "cache").exists()


def test_another_order_is_not_for_megatron_core(run, blend):
    (blend / "blend.toml").write_text(BLEND.replace("split", 'order = "balanced"\nsplit'))
    found = run("build", "blend.toml", "--for", "megatron-core", "--tokenizer-identity", IDENTITY)
    assert 'order must be "megatron", found "balanced"' in found.stderr
    assert run("build", "blend.toml").exit_code == 0


@pytest.mark.dist
def test_several_processes_build_the_same(run, blend):
    assert run("build", "blend.toml", "--cache", "alone").exit_code == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "trackbed", "build", "blend.toml", "--timeout", "30"],
            cwd=blend,
            env={**os.environ, **meeting, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert "with 3 processes; samples: train 30" in said[0][0]
    assert [out for out, _ in said[1:]] == ["", ""]
    wanted = {path.name: path.read_bytes() for path in (blend / "alone").iterdir() if path.is_file()}
    assert {path.name: path.read_bytes() for path in (blend / "cache").iterdir() if path.is_file()} == wanted
