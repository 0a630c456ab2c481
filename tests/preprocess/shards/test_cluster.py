"""Three nodes of Ray on this machine: lost nodes, a lost driver, and nodes that cannot make shards."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from trackbed.errors import TrackbedError
from trackbed.preprocess import PreprocessConfig, TrainingConfig, open_fastest_tokenizer, preprocess, train_tokenizer
from trackbed.preprocess.shards.spec import Probe

NODES = """
import os, signal, sys, time
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else the nodes take the machine's own address
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "kill\\n":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("killed", flush=True)
cluster.shutdown()
"""
LARGE_BYTES = 4 * 10**9
DRIVER = [sys.executable, "-W", "ignore", "-m", "trackbed", "preprocess"]


def write_texts(path, size_bytes):
    """Python files of this machine, repeated up to a size."""
    folders = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
    sources = [source for folder in folders for source in sorted(Path(folder).rglob("*.py"))]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while True:
            for source in sources:
                try:
                    line = json.dumps({"text": source.read_text(encoding="utf-8")}) + "\n"
                except (UnicodeDecodeError, OSError):
                    continue
                written += file.write(line)
                if written >= size_bytes:
                    return


class Corpus:
    """A corpus, its tokenizer, and the shards that the local pool makes of it."""

    def __init__(self, folder, size_bytes, shards):
        self.folder = folder
        (folder / "in").mkdir()
        for number in range(3):
            write_texts(folder / "in" / f"{number}.jsonl", size_bytes // 3)
        sample = folder / "sample.jsonl"
        write_texts(sample, 1_000_000)
        self.tokenizer = train_tokenizer(
            TrainingConfig(inputs=(sample,), vocab_size=2000), folder / "tokenizer.json"
        ).path
        self.shard_bytes = -(-sum(path.stat().st_size for path in (folder / "in").iterdir()) // shards)
        self.made("local", engine="local")
        self.files = self.files_of("local")

    def made(self, name, **options):
        (self.folder / name).mkdir()
        tokenizer = open_fastest_tokenizer(str(self.tokenizer))
        return preprocess(self.config(name, **options), tokenizer, executor=options.get("executor"))

    def config(self, name, *, engine="local", executor=None):
        return PreprocessConfig(
            inputs=(self.folder / "in",),
            output=str(self.folder / name / "c"),
            append_eod=True,
            workers=2,
            shard_bytes=self.shard_bytes,
            engine=engine,
        )

    def files_of(self, name):
        return {path.name: path.read_bytes() for path in (self.folder / name).iterdir()}

    def start(self, name, address, *, inputs="in", output=None):
        """Starts the command on a cluster."""
        (self.folder / name).mkdir(exist_ok=True)
        arguments = [inputs, "--tokenizer", "tokenizer.json", "--output", output or f"{name}/c", "--append-eod"]
        options = ["--shard-bytes", str(self.shard_bytes), "--engine", "ray"]
        environment = {**os.environ, "RAY_ADDRESS": address, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        return subprocess.Popen(
            [*DRIVER, *arguments, *options],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def seals(self, name):
        return sorted((self.folder / name).glob("*.trackbed.json"))

    def wait_for_seals(self, name, process, count=1):
        while process.poll() is None and len(self.seals(name)) < count:
            time.sleep(0.01)
        assert process.poll() is None, process.communicate()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(tmp_path_factory.mktemp("corpus"), 300_000, 5)


@pytest.fixture(scope="module")
def large_corpus(tmp_path_factory):
    """4 GB in 32 shards."""
    folder = tmp_path_factory.mktemp("large")
    free = shutil.disk_usage(folder).free
    if free < 4 * LARGE_BYTES:
        pytest.skip(f"{4 * LARGE_BYTES / 1e9:.0f} GB of free disk are needed, {folder} has {free / 1e9:.0f}")
    yield Corpus(folder, LARGE_BYTES, 32)
    shutil.rmtree(folder)


class Nodes:
    """A cluster of three nodes, two of them with a core, in a process of its own."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", NODES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._process.stdout.readline().strip()
        assert self.address

    def kill_one(self):
        """Kills a node with a core by SIGKILL."""
        self._process.stdin.write("kill\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "killed\n"

    def close(self):
        self._process.communicate()


@pytest.fixture
def nodes():
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.mark.usefixtures("local_ray")
def test_ray_writes_the_files_of_the_local_pool(corpus):
    corpus.made("ray", engine="ray")
    assert corpus.files_of("ray") == corpus.files


def test_an_executor_writes_the_files_of_the_local_pool(corpus):
    pool = partial(ProcessPoolExecutor, 2, mp_context=get_context("spawn"))
    corpus.made("executor", executor=pool)
    assert corpus.files_of("executor") == corpus.files


def test_a_worker_that_does_not_see_the_file_of_the_driver_is_refused(corpus, monkeypatch):
    elsewhere = Probe(str(corpus.folder / "nowhere"), "x")
    monkeypatch.setattr("trackbed.preprocess.shards.run.Probe", lambda *_: elsewhere)
    with pytest.raises(TrackbedError, match=r"must see the file .*nowhere as the driver has written it, found none"):
        corpus.made("unseen")
    assert corpus.files_of("unseen") == {}


@pytest.mark.slow
def test_a_node_that_is_killed_changes_no_byte(large_corpus, nodes):
    process = large_corpus.start("killed-node", nodes.address)
    large_corpus.wait_for_seals("killed-node", process, 5)
    nodes.kill_one()
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "attempt 1 failed" in errors
    assert "failed attempts" in output
    assert large_corpus.files_of("killed-node") == large_corpus.files
    shutil.rmtree(large_corpus.folder / "killed-node")


@pytest.mark.slow
def test_a_killed_driver_is_started_again_and_writes_no_sealed_shard_twice(large_corpus, nodes):
    process = large_corpus.start("killed-driver", nodes.address)
    large_corpus.wait_for_seals("killed-driver", process, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    stamps = {path: path.stat().st_mtime_ns for path in large_corpus.seals("killed-driver")}
    assert len(stamps) < 32
    again = large_corpus.start("killed-driver", nodes.address)
    output, errors = again.communicate()
    assert again.returncode == 0, errors
    assert f"shards 32, finished before {len(stamps)}" in output
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert large_corpus.files_of("killed-driver") == large_corpus.files
    shutil.rmtree(large_corpus.folder / "killed-driver")


@pytest.mark.slow
def test_from_a_bucket_to_a_bucket_a_killed_node_changes_no_byte(tmp_path, bucket, monkeypatch):
    monkeypatch.setenv("TRACKBED_STORE_TIMEOUT", "60")
    corpus = Corpus(tmp_path, 150_000_000, 32)
    for path in (tmp_path / "in").iterdir():
        bucket.client.upload_file(str(path), bucket.name, f"in/{path.name}")
    nodes = Nodes()
    try:
        process = corpus.start("out", nodes.address, inputs=bucket.text("in"), output=bucket.text("out/c"))
        while process.poll() is None and not any(key.endswith(".trackbed.json") for key in bucket.keys()):  # noqa: SIM118
            time.sleep(0.05)
        nodes.kill_one()
        output, errors = process.communicate()
    finally:
        nodes.close()
    assert process.returncode == 0, errors
    assert "failed attempts" in output
    for name, raw in corpus.files.items():
        if not name.endswith(".trackbed.json"):  # which has the names and tags of the objects
            assert bucket.get(f"out/{name}") == raw


@pytest.mark.slow
def test_ctrl_c_leaves_whole_shards_on_a_cluster(large_corpus, nodes):
    process = large_corpus.start("interrupted", nodes.address)
    large_corpus.wait_for_seals("interrupted", process, 3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert re.fullmatch(r"trackbed: interrupted: .* of 4,000\.\d MB are kept; .*", errors.splitlines()[-1])
    time.sleep(2)
    for seal in large_corpus.seals("interrupted"):
        for suffix in (".bin", ".idx", ".trackbed.json"):
            name = f"{seal.name.removesuffix('.trackbed.json')}{suffix}"
            assert (seal.parent / name).read_bytes() == large_corpus.files[name]
    shutil.rmtree(large_corpus.folder / "interrupted")
