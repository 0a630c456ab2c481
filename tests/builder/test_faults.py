"""Real processes that build together, one of which fails, dies or hangs: nobody waits for it in vain."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.files.blends import build, gpt_config, write_pair
from tests.support.files.generated import files_in
from tests.support.files.tidy import remove_folder
from tests.support.processes.launching import QUIET, environments, free_port
from tests.support.processes.slurm import running_slurm
from tests.support.tiers import slow_but

RANK = Path(__file__).with_name("fault_rank.py")
LIMIT_SECONDS = 60
HEARD_SECONDS = 2
TIMEOUT_SECONDS = 2
NAMED_SECONDS = 1.2 * TIMEOUT_SECONDS + 1.5 + 1.0  # the first process serves the store on for that long
NUM_PAIRS = 6
REQUEST = {
    "prefixes": [f"data/{number}" for number in range(NUM_PAIRS)],
    "weights": [3.0, 1.0, 1.0, 2.0, 1.0, 1.0],
    "split": "8,1,1",
    "sizes": [2000, 50, 50],
    "threads": 1,
    "timeout": TIMEOUT_SECONDS,
    "mode": "",
    "moment": "",
    "seconds": 0.0,
}


class Host:
    """A folder per rank, which shows it the data under the names that the others see, and one cache for all.

    Args:
        folder: where they are made.
        corpus: holds the pairs `0`, `1`, ...
        launcher: starts the ranks.
        size: how many ranks there are.
    """

    def __init__(self, folder, corpus, launcher=None, size=3):
        self.folder = folder
        self.launcher = launcher
        self.cache = folder / "cache"
        self.cache.mkdir(parents=True)
        for name in ("clean", *(f"rank{rank}" for rank in range(size))):
            (folder / name / "data").mkdir(parents=True)
            (folder / name / "cache").symlink_to(self.cache)
            for path in corpus.iterdir():
                (folder / name / "data" / path.name).symlink_to(path)

    def file(self, rank, name):
        """A file of the data as one rank sees it."""
        return self.folder / f"rank{rank}" / "data" / name

    def damage_lengths(self, rank):
        """In this rank's copies, one length in the middle of each `.idx` is negative, which no opening looks at."""
        for path in (self.folder / f"rank{rank}" / "data").glob("*.idx"):
            raw = bytearray(path.read_bytes())
            path.unlink()
            raw[34 + 4 * 1500 : 34 + 4 * 1501] = (-5).to_bytes(4, "little", signed=True)
            path.write_bytes(raw)

    def partials(self):
        """Names of unfinished files in the cache."""
        return sorted(path.name for path in self.cache.rglob("*.partial"))

    def build_again(self, monkeypatch, **changes):
        """By one process that sees everything. Returns the files of the cache."""
        asked = {**REQUEST, **changes}
        monkeypatch.chdir(self.folder / "clean")
        config = gpt_config(self.cache, blend=(asked["prefixes"], asked["weights"]), split=asked["split"])
        build(config, asked["sizes"])
        return files_in(self.cache)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Pairs of 3,000 documents each."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(NUM_PAIRS):
        write_pair(folder / str(number), [10 + number] * 3000, seed=number)
    return folder


@pytest.fixture(scope="module")
def wanted(corpus, tmp_path_factory):
    """The files that one process alone makes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return Host(tmp_path_factory.mktemp("alone"), corpus).build_again(monkeypatch)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running_slurm(tmp_path_factory.mktemp("srun") / "slurm") as slurm:
        yield slurm


@pytest.fixture(params=["torchrun", pytest.param("srun", marks=pytest.mark.slow)])
def launcher(request):
    """Starts the ranks of a build, each in its folder, and returns what each reported."""
    return start_each if request.param == "torchrun" else Srun(request.getfixturevalue("slurm"))


@pytest.fixture
def host(tmp_path, corpus, launcher):
    return Host(tmp_path / "host", corpus, launcher)


def run(host, *, who, size=3, hangs=False, **changes):
    """What each rank reported. The rank `who` is killed when the others have ended if it `hangs`."""
    folders = [host.folder / f"rank{rank}" for rank in range(size)]
    request = json.dumps({**REQUEST, "who": who, **changes})
    return host.launcher([sys.executable, "-W", "ignore", str(RANK), request], folders, who if hangs else None)


def start_each(command, folders, hanging):
    """Launches the ranks with the variables that torchrun sets."""
    processes = [
        subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for folder, environment in zip(folders, environments(len(folders)), strict=True)
    ]
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        for rank, process in enumerate(processes):
            if rank != hanging:
                process.wait(timeout=deadline - time.monotonic())
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        outputs = [process.communicate() for process in processes]
    return [reported(*output) for output in outputs]


class Srun:
    """Launches the ranks by srun, on two nodes; a rank that fails does not end the others."""

    def __init__(self, slurm):
        self.slurm = slurm

    def __call__(self, command, folders, hanging):
        # The status is written by another process, as the rank may be killed.
        in_folder = 'cd "$1"/rank"$SLURM_PROCID" && shift && { "$@" >output 2>errors; echo $? >status; }'
        options = ["-N2", f"-n{len(folders)}", "--kill-on-bad-exit=0", "--wait=0", "--job-name", folders[0].parent.name]
        srun = subprocess.Popen(
            ["srun", *options, "bash", "-c", in_folder, "bash", str(folders[0].parent), *command],
            env={**self.slurm.environment, **QUIET},
            cwd=folders[0].parent,
        )
        deadline = time.monotonic() + LIMIT_SECONDS
        waited = [folder / "status" for rank, folder in enumerate(folders) if rank != hanging]
        try:
            while not all(path.exists() for path in waited):
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(srun.args, LIMIT_SECONDS)
                time.sleep(0.02)
        finally:
            self.slurm.run("scancel", "--signal=KILL", "--name", folders[0].parent.name, check=False)
            srun.wait(timeout=20)
        return [reported(*((folder / name).read_text() for name in ("output", "errors"))) for folder in folders]


def reported(output, errors):
    found = {"stderr": errors[-2000:]}
    for line in output.splitlines():
        found.update(json.loads(line))
    return found


def others(ranks, who):
    return [rank for number, rank in enumerate(ranks) if number != who]


def check_told(ranks, who, words):
    """Every rank raised an error with these words, within two seconds."""
    texts = {rank.get("raised") for rank in ranks}
    assert len(texts) == 1, ranks
    (text,) = texts
    assert text.startswith(f"CollectiveError: building the indices: rank {who}: {words}"), ranks
    assert ranks[who]["cause"].startswith(words.partition(":")[0]), ranks
    assert max(rank["at"] for rank in ranks) - ranks[who].get("failed", ranks[who]["at"]) < HEARD_SECONDS, ranks


def check_heard(ranks, who):
    """Every other rank raised an error that names this one, within two seconds, wherever it was when it failed."""
    for rank in others(ranks, who):
        assert f"rank {who}: ValueError: it broke" in (rank.get("raised") or ""), ranks
    assert "it broke" in ranks[who]["raised"], ranks
    assert max(rank["at"] for rank in ranks) - ranks[who]["failed"] < HEARD_SECONDS, ranks


def check_named(ranks, who, *, is_gone):
    """Every other rank raised an error that names this one, within the timeout."""
    words = [f"rank {who} sent no heartbeat for {TIMEOUT_SECONDS} s"]
    if is_gone:  # on this host it is seen at once
        words += [f"rank {who} has ended (process "]
        # Another rank may have raised and ended meanwhile, before the slowest one looked.
        words += [f"ranks {min(who, other)} and {max(who, other)} have ended" for other in range(len(ranks))]
    if is_gone and who == 0:
        words += ["its host (usually rank 0) cannot be reached", "rank 0 must serve the group's store there"]
    for rank in others(ranks, who):
        assert any(word in (rank.get("raised") or "") for word in words), (rank, words)
    assert max(rank["at"] for rank in others(ranks, who)) - ranks[who]["failed"] < NAMED_SECONDS, ranks


def check_clean(host, wanted, monkeypatch, **changes):
    """One build later, the cache is what it would have been without any fault."""
    assert host.build_again(monkeypatch, **changes) == wanted
    assert host.partials() == []


@pytest.mark.parametrize(("who", "moment"), slow_but([(2, "during")], [(0, "after"), (1, "before"), (2, "during")]))
def test_an_exception_reaches_every_rank_with_its_words(host, wanted, monkeypatch, who, moment):
    ranks = run(host, who=who, mode="raise", moment=moment)
    check_told(ranks, who, "ValueError: it broke")
    assert host.partials() == []
    check_clean(host, wanted, monkeypatch)


def test_a_pair_that_is_missing_on_one_rank_is_named_on_every_rank(host, wanted, monkeypatch):
    host.file(2, "4.idx").unlink()
    ranks = run(host, who=2)
    check_told(ranks, 2, "ArgumentError: data/4: a .bin and an .idx file must exist, missing data/4.idx")
    check_clean(host, wanted, monkeypatch)


@pytest.mark.parametrize("threads", slow_but([2], [1, 2]))
def test_damage_that_is_found_while_building_is_told_to_every_rank(host, wanted, monkeypatch, threads):
    host.damage_lengths(0)  # it builds the datasets, which are one chunk, and the others a blend each
    ranks = run(host, who=0, threads=threads)
    check_told(ranks, 0, "FormatError: data/")
    assert "split train: documents must have at least 0 tokens and" in ranks[1]["raised"]
    assert host.partials() == []
    check_clean(host, wanted, monkeypatch)


def test_a_disk_that_is_full_on_one_rank_is_told_to_every_rank(host, wanted, monkeypatch):
    ranks = run(host, who=0, mode="full")
    check_told(ranks, 0, "CacheError: ")
    assert "cannot be written: File too large; path_to_cache must name a folder with room" in ranks[1]["raised"]
    assert host.partials() == []
    check_clean(host, wanted, monkeypatch)


def test_a_cache_that_cannot_be_written_by_one_rank_is_told_to_every_rank(host, wanted, monkeypatch):
    cache = host.folder / "rank2" / "cache"
    cache.unlink()
    cache.write_text("not a folder")
    ranks = run(host, who=2)
    check_told(ranks, 2, "CacheError: cache: the index ")
    check_clean(host, wanted, monkeypatch)


@pytest.mark.parametrize(("who", "moment"), slow_but([(0, "during")], [(0, "during"), (1, "before"), (2, "after")]))
def test_a_rank_that_is_killed_is_named(host, wanted, monkeypatch, who, moment):
    ranks = run(host, who=who, mode="kill", moment=moment)
    check_named(ranks, who, is_gone=True)
    check_clean(host, wanted, monkeypatch)


@pytest.mark.parametrize(("who", "moment"), slow_but([(1, "during")], [(0, "before"), (1, "during"), (2, "after")]))
def test_a_rank_that_hangs_is_named(host, wanted, monkeypatch, who, moment):
    ranks = run(host, who=who, mode="hang", moment=moment, hangs=True)
    check_named(ranks, who, is_gone=False)
    check_clean(host, wanted, monkeypatch)


def test_a_pipe_in_the_place_of_a_file_is_told_to_every_rank(host, wanted, monkeypatch):
    """Nobody writes to it: to open it as a file would wait for ever."""
    host.file(2, "3.idx").unlink()
    os.mkfifo(host.file(2, "3.idx"))
    ranks = run(host, who=2)
    check_told(ranks, 2, "FormatError: data/3.idx: an index header has 34 bytes, this file has 0")
    check_clean(host, wanted, monkeypatch)


# A blend of two pairs, for one rank, and the indices of 75 million samples of each, for the others: more than a second
# of work for each and 4 GB of files, had it not been stopped.
LONG = {
    "prefixes": ["data/0", "data/1"],
    "weights": [1.0, 1.0],
    "split": "1",
    "sizes": [150_000_000, 0, 0],
    "timeout": 30,
}


@pytest.mark.parametrize("who", slow_but([1], [0, 1, 2]))
def test_an_exception_is_heard_in_the_middle_of_long_kernels(host, who):
    ranks = run(host, who=who, mode="raise", moment="some time", seconds=0.4, **LONG)
    check_told(ranks, who, "ValueError: it broke")
    assert list(files_in(host.cache)) == []


def test_damage_found_by_one_rank_is_heard_in_the_middle_of_the_others_long_kernels(host):
    host.damage_lengths(1)
    host.damage_lengths(2)  # two of three ranks build a dataset, and one of them the blend
    ranks = run(host, who=1, **LONG)
    who = next(number for number, rank in enumerate(ranks) if rank["cause"].startswith("FormatError"))
    assert who in (1, 2)
    check_told(ranks, who, "FormatError: data/")
    assert list(files_in(host.cache)) == []


def test_under_torchrun_nothing_is_left_behind(tmp_path, corpus, wanted, monkeypatch):
    """Neither processes, when the launcher has ended, nor unfinished files, when the next build has."""
    host = Host(tmp_path / "host", corpus)
    request = json.dumps({**REQUEST, "who": 1, "mode": "kill", "moment": "during"})
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=3"]
    place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    ended = subprocess.run(
        [*torchrun, *place, str(RANK), request],
        env={**os.environ, **QUIET},
        cwd=host.folder / "clean",
        timeout=LIMIT_SECONDS,
        capture_output=True,
    )
    assert ended.returncode != 0
    assert processes_in(host.folder / "clean") == []
    check_clean(host, wanted, monkeypatch)


def processes_in(folder):
    """Numbers of the processes that work in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").readlink() == folder:
                found.append(path.name)
        except OSError:
            pass  # it has ended meanwhile, or is somebody else's
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_to_whom_and_when_no_rank_hangs(launcher, corpus, seed, tmp_path, monkeypatch):
    draw = random.Random(seed)
    sizes = {"sizes": [3_000_000, 50, 50]}
    wanted = Host(tmp_path / "alone", corpus).build_again(monkeypatch, **sizes)
    for turn in range(10):
        host = Host(tmp_path / f"host{turn}", corpus, launcher)
        mode, who = draw.choice(["raise", "kill", "stop", "hang"]), draw.randrange(3)
        # At some time a thread opens the pipe, which stops no other thread: that would be no fault.
        moment = draw.choice(["before", "during", "after", *(["some time"] if mode != "hang" else [])])
        hangs = mode in ("hang", "stop")
        asked = {"who": who, "mode": mode, "moment": moment, "seconds": draw.random(), "threads": draw.choice([1, 2])}
        ranks = run(host, hangs=hangs, **asked, **sizes)
        if moment == "some time" and all(rank.get("raised", 0) is None for rank in others(ranks, who)):
            continue  # they had all done by then
        if mode == "raise" and moment == "some time":
            check_heard(ranks, who)
        elif mode == "raise":
            check_told(ranks, who, "ValueError: it broke")
        else:
            check_named(ranks, who, is_gone=mode != "hang")
        check_clean(host, wanted, monkeypatch, **sizes)
        remove_folder(host.folder)
