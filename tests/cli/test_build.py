import json
import os
import re
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.files.blends import write_pair, write_pairs
from tests.support.files.tidy import remove_folder
from tests.support.tiers import slow_but

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
needs_megatron_core = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
IDENTITY = json.dumps({"class": "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText", "path": "x"})


@pytest.fixture
def blend(tmp_path):
    """Writes a blend of pair0, pair1 and pair2 to the working folder. Returns the folder."""
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


def test_more_samples_than_were_asked_for_are_explained(run, blend):
    text = BLEND.replace("train = 300", "train = 301")
    (blend / "blend.toml").write_text(text)
    (line,) = run("build", "blend.toml").stdout.splitlines()
    assert "samples: train 302 (301 asked for), valid " in line
    assert line.endswith("; there are more, as the share of each dataset is rounded up")
    (blend / "blend.toml").write_text(text.split("weight = 0.5\n[[dataset]]\nglob")[0])
    (line,) = run("build", "blend.toml").stdout.splitlines()
    assert line.endswith("; there are more, as a dataset has all samples of the epochs that it needs")


def test_a_file_without_tokenizer_and_cache_is_told_both_at_once(run, blend):
    text = BLEND.replace('cache = "cache"\n', "").replace("[tokenizer]\neod = 100\nvocab_size = 101\n", "")
    (blend / "blend.toml").write_text(text)
    found = run("build", "blend.toml")
    assert (found.exit_code, found.stderr.splitlines()) == (
        1,
        [
            "trackbed: blend.toml:1: tokenizer must be given to build a dataset, found none",
            "trackbed: blend.toml:1: cache must name a folder for the indices, found none: give --cache FOLDER",
        ],
    )


def test_a_plan_builds_nothing(run, blend):
    found = run("build", "blend.toml", "--plan", "--ranks", "4", "--threads", "2")
    assert found.exit_code == 0, found.stderr
    assert "12 indices to build, 3 of them of blends, by 4 processes of 2 threads" in found.stdout
    assert "predicted: " in found.stdout
    assert not (blend / "cache").exists()
    assert run("build", "blend.toml").exit_code == 0
    assert "nothing to build" in run("build", "blend.toml", "--plan").stdout


@pytest.mark.parametrize("order", slow_but(["balanced"], ["megatron", "balanced"]))
def test_a_plan_leaves_no_trace_in_a_cache(run, blend, order):
    (blend / "blend.toml").write_text(BLEND.replace("split", f'order = "{order}"\nsplit'))
    assert run("build", "blend.toml").exit_code == 0
    own = blend / "cache" / ".trackbed"
    for folder in (own / "uses", own / "notes", own / "partial"):
        if folder.exists():
            remove_folder(folder)
    for path in (blend / "cache").rglob("*"):
        os.utime(path, (0, 0))
    os.utime(own, (0, 0))
    before = {path: path.stat() for path in sorted((blend / "cache").rglob("*"))}
    for environment in ({}, {"TRACKBED_BOOT_ID": "another"}):
        planned = subprocess.run(
            [sys.executable, "-m", "trackbed", "build", "blend.toml", "--plan"],
            cwd=blend,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "nothing to build" in planned.stdout
    after = {path: path.stat() for path in sorted((blend / "cache").rglob("*"))}
    assert list(after) == list(before)
    for path, status in after.items():
        assert (status.st_mtime_ns, status.st_size, status.st_ino) == (
            before[path].st_mtime_ns,
            before[path].st_size,
            before[path].st_ino,
        ), path


def test_a_plan_is_made_where_blends_take_whole_datasets(run, blend):
    text = BLEND.replace("weight = 0.5\n", "").replace("train = 300\nvalid = 5\ntest = 5\n", "").replace("[size]\n", "")
    (blend / "whole.toml").write_text(text)
    assert "9 indices to build, 0 of them of blends" in run("build", "whole.toml", "--plan").stdout
    found = run("build", "whole.toml")
    assert found.exit_code == 0, found.stderr
    assert "nothing to build" in run("build", "whole.toml", "--plan").stdout


@needs_megatron_core
def test_megatron_core_starts_from_them(run, blend):
    found = run(
        "build", "blend.toml", "--for", "megatron-core", "--tokenizer-identity", IDENTITY,
        "--check-against", "megatron-core",
    )  # fmt: skip
    assert found.exit_code == 0, found.stderr
    assert "builds nothing" in found.stdout


def test_an_identity_of_another_release_is_refused(run, blend):
    name = "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText"
    for release, more, words in (
        ("0.19.2", {}, "tokenizer.megatron must have 'pad_id' in release 0.19.2"),
        ("0.16.1", {"pad_id": -1}, "tokenizer.megatron must have no 'pad_id' in release 0.16.1"),
        ("0.19.2", {"pad_id": -1}, ""),
        ("0.16.1", {}, ""),
    ):
        identity = json.dumps({"class": name, "options": {"vocab_size": 255, **more}})
        found = run("build", "blend.toml", "--for", f"megatron-core=={release}", "--tokenizer-identity", identity)
        assert (found.exit_code, words in found.stderr) == (int(bool(words)), True)


@pytest.mark.parametrize("name", ["conf/blend.toml", "{folder}/blend.toml", "{folder}/conf/../blend.toml"])
def test_the_names_for_megatron_core_are_those_of_a_job_in_the_working_directory(name, run, blend):
    (blend / "conf").mkdir()
    moved = BLEND.replace('"pair', '"../pair').replace('"cache"', '"../cache"')
    (blend / "conf" / "blend.toml").write_text(moved)
    options = ["--for", "megatron-core", "--tokenizer-identity", IDENTITY]
    assert run("build", "blend.toml", *options).exit_code == 0
    built = stamps(blend / "cache")
    found = run("build", name.format(folder=blend), *options)
    assert found.exit_code == 0, found.stderr
    assert stamps(blend / "cache") == built


@pytest.mark.slow
@needs_megatron_core
def test_indices_of_a_corpus_made_again_are_not_left_under_megatron_cores_names(run, blend):
    options = ["build", "blend.toml", "--for", "megatron-core", "--tokenizer-identity", IDENTITY]
    assert run(*options).exit_code == 0
    write_pair(blend / "pair1", [9] * 77)
    found = run(*options)
    assert found.exit_code == 1
    assert "an index of other data, for example of a regenerated corpus: remove NAME-*" in found.stderr
    names = re.findall(r"[0-9a-f]{32}-[A-Za-z]+-[a-z]+", found.stderr)
    assert names  # of the splits whose number of samples is the same
    for name in names:
        for path in ((blend / "cache" / ".trackbed" / f"{name}.json"), *(blend / "cache").glob(f"{name}-*")):
            path.unlink()
    found = run(*options, "--check-against", "megatron-core")
    assert found.exit_code == 0, found.stderr
    assert "builds nothing" in found.stdout


@pytest.mark.slow
@needs_megatron_core
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
        ("", ["--for", "megatron-core"], "must state the identity of the job's tokenizer"),
        ("", ["--ranks", "2"], "--ranks needs --plan"),
        ("", ["--tokenizer-identity", "{}"], "must be JSON like"),
        ("", ["--tokenizer-identity", "[1]"], "must be JSON like"),
    ],
)
def test_invalid_options_are_refused_before_any_work(run, blend, change, options, words):
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
    rendezvous = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "trackbed", "build", "blend.toml", "--timeout", "30"],
            cwd=blend,
            env={**os.environ, **rendezvous, "RANK": str(rank)},
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


STRANGER = """
import sys, time, json
from datetime import timedelta
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
while True:
    store.set("trackbed/0/0/0/outcome", json.dumps([None, "words of a stranger", True, False]).encode())
    store.set("trackbed/0/0/0/flag", b"")
    time.sleep(0.01)
"""


def ranks_of_build(folder, size, *options, ranks=None, **variables):
    """Starts `trackbed build` as ranks of a group of `size`. Returns the processes and the port of the rendezvous."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = {"WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", **variables}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "trackbed", "build", "blend.toml", "--timeout", "5", *options],
            cwd=folder,
            env={**os.environ, **rendezvous, "RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (range(size) if ranks is None else ranks)
    ]
    return processes, port


@pytest.mark.dist
def test_a_stranger_cannot_send_an_outcome(blend):
    (rank,), port = ranks_of_build(blend, 2, ranks=[0])
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER, str(port)], stderr=subprocess.DEVNULL)
    try:
        out, err = rank.communicate(timeout=60)
    finally:
        stranger.kill()
        stranger.wait()
    assert rank.returncode == 1
    assert "another process has changed the rendezvous store" in err
    assert "words of a stranger" not in out + err


@pytest.mark.dist
def test_the_store_listens_on_one_interface(blend):
    (rank,), port = ranks_of_build(blend, 2, ranks=[0])
    try:
        deadline = time.monotonic() + 30
        while not (listening := addresses_listening(port)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert listening == {"0100007F"}  # 127.0.0.1, as /proc shows it
    finally:
        rank.kill()
        rank.communicate()


def addresses_listening(port):
    """Returns the addresses on which processes of this machine listen at a port, in hexadecimal."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            address, _, number = place.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(address)
    return found


@pytest.mark.dist
def test_processes_share_a_secret_that_only_their_user_can_read(blend):
    processes, _ = ranks_of_build(blend, 2)
    said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    (secret,) = (blend / "cache" / ".trackbed").glob("secret-*")
    assert secret.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.dist
def test_several_processes_need_no_secret_where_nothing_is_built(blend):
    (blend / "blend.toml").write_text(BLEND.replace('cache = "cache"\n', 'order = "instant"\n'))
    processes, _ = ranks_of_build(blend, 2)
    said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [out for out, _ in said] == ["nothing to build: the order is instant\n", ""]
    processes, _ = ranks_of_build(blend, 2, "--secret-file", "secret")
    said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said


@pytest.mark.dist
def test_hosts_with_different_secrets_get_an_error(blend):
    processes, port = ranks_of_build(blend, 2, "--secret-file", "one", ranks=[0])
    others, _ = ranks_of_build(blend, 2, "--secret-file", "other", ranks=[1], MASTER_PORT=f"{port}")
    said = [process.communicate(timeout=60)[1] for process in (*processes, *others)]
    assert [process.returncode for process in (*processes, *others)] == [1, 1], said
    assert any("ranks whose secrets differ" in err for err in said)


def test_a_secret_that_others_can_read_is_refused(run, blend, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    (blend / "secret").write_text("ab" * 32)
    (blend / "secret").chmod(0o644)
    found = run("build", "blend.toml", "--secret-file", "secret")
    assert found.exit_code == 1
    assert "only its owner may have access to the secret, found mode 0644" in found.stderr
    (blend / "file").touch()
    found = run("build", "blend.toml", "--secret-file", "file/secret")
    assert "the processes must be able to read or create the secret, found: File exists" in found.stderr
