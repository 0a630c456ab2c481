"""Runs of `examples/pretrain_gpt.py` that are ended again and again, in all ways."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT
from tests.support.files.built_pair import build

STEPS, BATCH, EVERY = 400, 8, 10
TIMEOUT_SECONDS = 120
"""Longest time that a job may take, and that an ended one may take to end."""
KINDS = ("one rank", "all", "writer", "SIGTERM", "full disk", "restart")
BLEND = f"""version = 1
sequence_length = 16
order = "instant"
split = "1"
size = {{train = {STEPS * BATCH}}}
tokenizer = {{eod = 0, vocab_size = 1000}}
[[dataset]]
path = "a"
weight = 3
[[dataset]]
path = "b"
weight = 1
"""


def write_data(folder):
    """Two pairs and a blend file."""
    for name, first in (("a", 1), ("b", 500)):
        build(folder / name, [[first + (7 * one + two) % 400 for two in range(90)] + [0] for one in range(60)])
    (folder / "blend.toml").write_text(BLEND)


def write_config(folder, name, parallel):
    """The file of a run; the jobs of one that is ended write in processes of their own."""
    path = folder / f"{name}.toml"
    path.write_text(
        f'run = "{name}"\nblend = "blend.toml"\nsteps = {STEPS}\n'
        f"global_batch_size = [[0, {BATCH // 2}], [40, {BATCH}]]\n"
        f'micro_batch_size = 2\nparallel = "{parallel}"\ncheckpoint_every = {EVERY}\nkeep_checkpoints = 2\n'
        f'eval_every = 0\nwriter = "{"thread" if name == "whole" else "process"}"\n'
        "[model]\nwidth = 16\nheads = 2\nlayers = 1\n"
    )
    return path


@dataclass
class Job:
    """A job under torchrun."""

    config: Path
    ranks: int
    restarts: int = 0
    script: Path = ROOT / "examples" / "pretrain_gpt.py"
    arguments: tuple[str, ...] = ()

    def __post_init__(self):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(self.ranks), "--max-restarts", str(self.restarts)]
        command = [*launcher, str(self.script), str(self.config), *self.arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # Otherwise ranks that torchrun has started again may find the addresses of those before them (torch 2.13).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # Through a pipe, as what a job says must not be limited with its files.
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self._said = []
        self._reader = threading.Thread(target=lambda: self._said.extend(self.process.stdout), daemon=True)
        self._reader.start()

    @property
    def words(self):
        """Output of the job."""
        self._reader.join(5)
        return "".join(self._said)

    def wait(self):
        """Its exit status, in time."""
        try:
            return self.process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a job has not ended in {TIMEOUT_SECONDS} s: {self.words[-3000:]}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self._reader.join(5)
            if not self._reader.is_alive():
                self.process.stdout.close()

    def ranks_of(self):
        """Processes of the ranks that are there."""
        return children(self.process.pid)

    def await_step(self, step):
        """Waits until a step is recorded. False if the job has ended before."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while last_step(self.config) < step:
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.words[-3000:]
            time.sleep(0.005)
        return True


def children(process):
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def last_step(config):
    """The step of the last whole line."""
    with contextlib.suppress(OSError, IndexError):
        lines = (config.with_suffix("") / "steps.jsonl").read_text().split("\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    return 0


def end(job, kind, draw):
    """Ends a job in a way, which may also be that nothing of it is hit any more."""
    ranks = job.ranks_of()
    with contextlib.suppress(ProcessLookupError, IndexError):
        if kind in ("one rank", "restart"):
            os.kill(draw.choice(ranks), signal.SIGKILL)
        elif kind == "all":
            for process in (job.process.pid, *ranks):  # ranks are not in the process group of the launcher
                os.kill(process, signal.SIGKILL)
        elif kind == "writer":
            os.kill(draw.choice([one for rank in ranks for one in children(rank)]), signal.SIGKILL)
            # The next save may have another one: then the job goes on until it is told to end.
            if job.await_step(last_step(job.config) + EVERY + 2):
                os.kill(draw.choice(ranks), signal.SIGTERM)
        elif kind == "SIGTERM":
            os.kill(draw.choice(ranks), signal.SIGTERM)
        else:
            for process in [one for rank in ranks for one in (rank, *children(rank))]:
                resource.prlimit(process, resource.RLIMIT_FSIZE, (64, 64))


def is_named(words):
    """True if a job has said why it ended."""
    return "trackbed.errors." in words or "SIGKILL" in words or "OSError" in words or "Signal 9" in words


def soak(folder, parallel, num_ends, seed):
    """Ends a run a number of times, then lets it train all steps. Returns how often each kind was used."""
    draw = random.Random(seed)
    config = write_config(folder, f"ended-{parallel}", parallel)
    met = dict.fromkeys(KINDS, 0)
    kinds = []
    while len(kinds) < num_ends:
        kinds += draw.sample(KINDS[:-1], len(KINDS) - 1)
    kinds = [*kinds[: num_ends - 1], KINDS[-1]]  # restarted ranks train all steps that are left
    for number, kind in enumerate(kinds):
        room = (STEPS - 60 - last_step(config)) // (num_ends - number)
        job = Job(config, 1 + number % 2, restarts=int(kind == "restart"))
        if not job.await_step(last_step(config) + draw.randrange(1, max(2, room))):
            status = job.wait()
            raise AssertionError(f"a job has ended by itself with {status}: {job.words[-3000:]}")
        time.sleep(0.02 * draw.random())
        end(job, kind, draw)
        status = job.wait()
        if kind == "restart":
            assert status == 0, job.words[-3000:]
        else:
            assert status in (0, -signal.SIGKILL) or is_named(job.words), (kind, status, job.words[-3000:])
        met[kind] += 1
    assert last_step(config) == STEPS, met
    return met
