"""The job scripts of the page on Slurm, on a Slurm of two nodes on this machine."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from trackbed.preprocess import PreprocessConfig, TrainingConfig, open_fastest_tokenizer, preprocess, train_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol")
CONFIGURATION = """
ClusterName=trackbed
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NUM_SHARDS = 24


def free_ports(count):
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Slurm:
    """A controller and two nodes."""

    def __init__(self, folder):
        self.folder = folder
        ports = free_ports(4)
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(CONFIGURATION.format(folder=folder, ports=ports))
        import ray

        own = {
            "SLURM_CONF": str(self.configuration),
            "MASTER_ADDR": "127.0.0.1",  # the names of the nodes do not resolve
            "RAY_HEAD": ray.util.get_node_ip_address(),
            "RAY_PORT": str(ports[3]),
            "RAY_OPTIONS": "--min-worker-port=0 --max-worker-port=0",  # both nodes are this machine
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONWARNINGS": "ignore",
        }
        self.environment = {**os.environ, **own}
        self.run("slurmctld", "-c")
        for node in ("n1", "n2"):
            self.run("slurmd", "-N", node)
        deadline = time.monotonic() + 30
        while "idle" not in self.run("sinfo", "-h", "-o", "%T %D", check=False):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.1)

    def run(self, *command, check=True, **environment):
        found = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, check=False
        )
        assert found.returncode == 0 or not check, found.stderr
        return found.stdout

    def submit(self, folder, script, **environment):
        """Submits a job, and returns its number."""
        output = self.run("sbatch", "--parsable", "--chdir", str(folder), str(folder / script), **environment)
        return output.strip()

    def wait(self, job, seconds=300):
        """Waits for the end of a job, and returns its exit status."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.run("scontrol", "show", "job", job)
            if re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", found):
                return int(re.search(r"ExitCode=(\d+):", found)[1])
            time.sleep(0.2)
        pytest.fail(f"job {job} did not end: {found}")

    def kill_node(self, node):
        """Kills a node: its daemon, and all processes of jobs there."""
        os.kill(int((self.folder / f"{node}.pid").read_text()), signal.SIGKILL)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                variables = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.configuration}".encode()} <= set(variables):
                os.kill(int(process.name), signal.SIGKILL)

    def close(self):
        self.run("scancel", "--state=RUNNING", "--full", check=False)
        time.sleep(1)
        processes = [int(path.read_text()) for path in self.folder.glob("*.pid")]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            time.sleep(1)


@pytest.fixture
def slurm(tmp_path):
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"Debian's packages slurmctld, slurmd and slurm-client are not installed: no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("slurmd must run as root")
    (tmp_path / "slurm").mkdir()
    slurm = Slurm(tmp_path / "slurm")
    yield slurm
    slurm.close()


def snippets(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with everything that the scripts use, and the files of a local run in `local`."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("corpus", "local"):
        (folder / name).mkdir()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts = [source.read_text(encoding="utf-8", errors="ignore") for source in sources]
    for number in range(4):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[number::2])
        (folder / "corpus" / f"{number}.jsonl").write_text("".join(lines))
    train_tokenizer(TrainingConfig(inputs=(folder / "corpus" / "3.jsonl",), vocab_size=400), folder / "tokenizer.json")
    for name, text in zip(("tokenise.sh", "build.sh", "train.sh"), snippets("bash"), strict=True):
        (folder / name).write_text(text)
    (folder / "blend.toml").write_text(snippets("toml")[0])
    (folder / "train.py").write_text(snippets("python")[0])
    size = sum(path.stat().st_size for path in (folder / "corpus").iterdir())
    config = PreprocessConfig(
        inputs=(folder / "corpus",),
        output=str(folder / "local" / "web"),
        append_eod=True,
        shard_bytes=-(-size // NUM_SHARDS),
    )
    preprocess(config, open_fastest_tokenizer(str(folder / "tokenizer.json")))
    return folder, str(config.shard_bytes)


@pytest.fixture
def job_folder(corpus):
    """The folder of the corpus, without the results of another test."""
    folder, _ = corpus
    for name in ("tokens", "cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "state.pt").unlink(missing_ok=True)
    (folder / "tokens").mkdir()
    return folder


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def files_in_tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.npy")}


def log_of(folder, name, job):
    return (folder / f"{name}-{job}.log").read_text()


def wait_for_seals(folder, count):
    deadline = time.monotonic() + 120
    while len(list((folder / "tokens").glob("*.trackbed.json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_three_jobs_give_the_bytes_of_one_machine(slurm, job_folder, corpus):
    tokenise = slurm.submit(job_folder, "tokenise.sh", SHARD_BYTES=corpus[1])
    assert slurm.wait(tokenise) == 0, log_of(job_folder, "tokenise", tokenise)
    assert files_in(job_folder / "tokens") == files_in(job_folder / "local")
    build = slurm.submit(job_folder, "build.sh")
    assert slurm.wait(build) == 0, log_of(job_folder, "build", build)
    assert "with 4 processes" in log_of(job_folder, "build", build)
    built = files_in_tree(job_folder / "cache")
    train = slurm.submit(job_folder, "train.sh")
    assert slurm.wait(train) == 0, log_of(job_folder, "train", train)
    (job_folder / "state.pt").unlink()
    shutil.rmtree(job_folder / "cache")
    alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "MASTER_PORT": str(free_ports(1)[0])}
    environment = {**slurm.environment, **alone}
    found = subprocess.run(
        [sys.executable, "train.py"], cwd=job_folder, env=environment, capture_output=True, text=True, check=True
    )
    assert log_of(job_folder, "train", train).splitlines()[-1] == found.stdout.splitlines()[-1]
    assert files_in_tree(job_folder / "cache") == built


def test_a_node_that_is_lost_changes_no_byte(slurm, job_folder, corpus):
    job = slurm.submit(job_folder, "tokenise.sh", SHARD_BYTES=corpus[1])
    wait_for_seals(job_folder, 2)
    slurm.kill_node("n2")
    status = slurm.wait(job)
    log = log_of(job_folder, "tokenise", job)
    assert status == 0, log
    assert files_in(job_folder / "tokens") == files_in(job_folder / "local")


def test_a_signal_before_the_wall_limit_leaves_whole_shards_for_the_next_job(slurm, job_folder, corpus):
    job = slurm.submit(job_folder, "tokenise.sh", SHARD_BYTES=corpus[1])
    wait_for_seals(job_folder, 2)
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    assert slurm.wait(job) == 143, log_of(job_folder, "tokenise", job)
    assert "interrupted: submit this script again" in log_of(job_folder, "tokenise", job)
    seals = list((job_folder / "tokens").glob("*.trackbed.json"))
    assert 2 <= len(seals) < NUM_SHARDS
    again = slurm.submit(job_folder, "tokenise.sh", SHARD_BYTES=corpus[1])
    assert slurm.wait(again) == 0, log_of(job_folder, "tokenise", again)
    assert f"finished before {len(seals)}" in log_of(job_folder, "tokenise", again)
    assert files_in(job_folder / "tokens") == files_in(job_folder / "local")


def test_a_rank_of_the_build_that_is_killed_ends_all_ranks_with_its_name(slurm, job_folder, corpus):
    shutil.copytree(job_folder / "local", job_folder / "tokens", dirs_exist_ok=True)
    own = '[ "$SLURM_PROCID" = 2 ] && { sleep 0.6; kill -9 $!; }; wait $!'
    command = ["srun", "-N2", "-n4", "--kill-on-bad-exit=0", "bash", "-c"]
    found = subprocess.run(
        [*command, f"trackbed build blend.toml --timeout 10 & {own}"],
        cwd=job_folder,
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert found.returncode != 0
    errors = [line for line in found.stderr.splitlines() if line.startswith("trackbed: ")]
    assert len(errors) == 3, found.stderr
    assert all("rank 2" in line or "ranks joined" in line for line in errors), errors
    subprocess.run(
        ["srun", "-N2", "-n4", "trackbed", "build", "blend.toml"],
        cwd=job_folder,
        env=slurm.environment,
        capture_output=True,
        check=True,
        timeout=200,
    )
    on_slurm = files_in_tree(job_folder / "cache")
    shutil.rmtree(job_folder / "cache")
    subprocess.run(
        [sys.executable, "-m", "trackbed", "build", "blend.toml"], cwd=job_folder, check=True, capture_output=True
    )
    assert files_in_tree(job_folder / "cache") == on_slurm
