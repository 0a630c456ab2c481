"""The job scripts of the page on Slurm, on a Slurm of two nodes on this machine."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

import trackbed
from tests.support.processes.launching import free_port
from tests.support.processes.slurm import running_slurm
from trackbed.preprocess import PreprocessConfig, TrainingConfig, open_fastest_tokenizer, preprocess, train_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
NUM_SHARDS = 24


@pytest.fixture
def slurm(tmp_path):
    with running_slurm(tmp_path / "slurm") as slurm:
        yield slurm


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
    for name in ("tokens", "cache", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "tokens").mkdir()
    return folder


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def files_in_tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.npy")}


def log_of(folder, name, job):
    return (folder / f"{name}-{job}.log").read_text()


def steps_in(log):
    return [int(step) for step in re.findall(r"^step (\d+): loss", log, flags=re.MULTILINE)]


def losses_in(log):
    return [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", log, flags=re.MULTILINE)]


def wait_until(is_true):
    deadline = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_seals(folder, count):
    wait_until(lambda: len(list((folder / "tokens").glob("*.trackbed.json"))) >= count)


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
    shutil.rmtree(job_folder / "checkpoints")
    shutil.rmtree(job_folder / "cache")
    alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "MASTER_PORT": str(free_port())}
    environment = {**slurm.environment, **alone}
    found = subprocess.run(
        [sys.executable, "train.py"], cwd=job_folder, env=environment, capture_output=True, text=True, check=True
    )
    assert steps_in(log_of(job_folder, "train", train)) == steps_in(found.stdout) == list(range(1, 9))
    assert losses_in(log_of(job_folder, "train", train)) == pytest.approx(losses_in(found.stdout), abs=0.002)
    assert files_in_tree(job_folder / "cache") == built


def test_a_signal_ends_all_ranks_of_the_training_at_one_step_and_the_next_job_goes_on(slurm, job_folder):
    shutil.copytree(job_folder / "local", job_folder / "tokens", dirs_exist_ok=True)
    longer = (
        snippets("toml")[0].replace("train = 64", "train = 200_000").replace('cache = "cache"', 'order = "instant"')
    )
    (job_folder / "blend.toml").write_text(longer)
    steps = []
    for _ in range(2):
        job = slurm.submit(job_folder, "train.sh")
        log = job_folder / f"train-{job}.log"
        wait_until(lambda log=log: log.exists() and len(steps_in(log.read_text())) >= 20)
        slurm.run("scancel", "--signal=TERM", job)  # to the steps, as --signal=TERM@120 has it sent
        assert slurm.wait(job) == 0, log.read_text()
        steps.append(steps_in(log.read_text()))
        assert trackbed.latest_checkpoint(job_folder / "checkpoints").name == f"step-{steps[-1][-1]:07}"
    (job_folder / "blend.toml").write_text(snippets("toml")[0])
    assert steps[0] + steps[1] == list(range(1, steps[1][-1] + 1))


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
