"""Jobs that keep checkpoints in one place and are killed one after the other: `killed_jobs.py PLACE FOLDER COUNT`.

PLACE is a folder or an address; FOLDER is for reports.

Each job verifies what is there, sometimes goes back to an older step, and saves until it is killed. Some have a second
job beside them, which must be refused. After each kill the checkpoints are compared with what a model allows. Writes a
line of JSON with what is wrong. Jobs are forked from this process, which has imported everything but the client of the
store; what looks at the place is forked, too.
"""

import json
import os
import random
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from tests.checkpointer.kept import removed_steps
from trackbed import Checkpointer, ShardedTensor, load
from trackbed.checkpoint.damage import find_damage
from trackbed.checkpoint.leftovers import find_leftovers
from trackbed.checkpointer.runs import run_in
from trackbed.checkpointer.steps import StepNames
from trackbed.comm import SOLO
from trackbed.errors import CheckpointError
from trackbed.files.stores import is_address

KEEP = {"keep_last": 3, "keep_every": 10, "keep": {7}}


class Report:
    """Lines of a job in a file, each whole or not there."""

    def __init__(self, path):
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, *line):
        os.write(self.descriptor, json.dumps(line).encode() + b"\n")


def work(place, number, path):
    """A job, which never ends by itself."""
    draw, report = random.Random(number), Report(path)
    options = {"writer": draw.choice(["thread", "thread", "process"]), "max_bytes": draw.choice([None, 1 << 20])}
    checkpointer = Checkpointer(place, group=SOLO, **KEEP, **options)
    latest = checkpointer.latest(verified=True)
    report("latest", latest)
    steps = checkpointer.steps()
    step = latest or 0
    if len(steps) > 1 and draw.random() < 0.3:
        step = draw.choice(steps[:-1])
        report("back", step)
        checkpointer.load(state(0), step=step)
    elif latest is not None:
        checkpointer.load(state(0))
    while True:
        step += draw.randint(1, 3)
        value = 1000 * number + step
        report("begin", step, value)
        checkpointer.save(step, state(value))
        if draw.random() < 0.4:
            checkpointer.wait()
            report("whole", step, value)
        time.sleep(draw.random() * 0.02)


def state(value):
    many = ShardedTensor.from_rank_offsets("many", torch.full((500_000,), float(value)))
    return {"many": many, "few": torch.full((100,), float(value))}


def refused(place):
    """A second job in the place. Exits with 0 if it is refused by name."""
    try:
        Checkpointer(place, group=SOLO)
    except CheckpointError as error:
        return 0 if re.search(r"must be kept by one job, but (process )?\S+.* keeps checkpoints", str(error)) else 1
    return 1


def fork(function):
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # its writer process may be killed with it
        status = 1
        try:
            status = function()
        finally:
            os._exit(status)
    return pid


def ended(function, path):
    """Runs a function in a process of its own, and returns what it returned, as JSON has it."""

    def report():
        path.write_text(json.dumps(function()))
        return 0

    _, status = os.waitpid(fork(report), 0)
    if status:
        raise RuntimeError("what looks at the place has failed")
    return json.loads(path.read_text())


def checkpoints_in(place):
    """Pairs of step and value of each checkpoint. Those that are not whole raise."""
    found = []
    run = run_in(place)
    for step in run.steps(StepNames()):
        path = run.path(StepNames().name(step))
        problem = next(find_damage(path), None)
        if problem is not None:
            raise ValueError(f"{path}: {problem}")
        loaded = load(state(0), path)
        (value,) = torch.cat([loaded["many"], loaded["few"]]).unique().tolist()
        found.append((step, value))
    return found


def left_in(place):
    """Starts and ends a job, and returns what it has not removed of unfinished saves."""
    Checkpointer(place, group=SOLO).close()
    if is_address(place):
        return [one.address for one in find_leftovers(place)]
    return [path.name for path in Path(place).iterdir() if "partial" in path.name]


def allowed(before, lines):
    """Pairs of what must be there after a kill, and of what may be."""
    back = next((line[1] for line in lines if line[0] == "back"), None)
    begun = [tuple(line[1:]) for line in lines if line[0] == "begin"]
    whole = [step for word, step, *_ in lines if word == "whole"]
    num_whole = max((number for number, (step, _) in enumerate(begun, 1) if step in whole), default=0)
    num_whole = max(num_whole, len(begun) - 2)  # a save begins after the end of the one before
    must = dict(before)
    may = dict(before)
    if num_whole == 0:
        yield {step: value for step, value in before.items() if back is None or step <= back}, may
    for index, (step, value) in enumerate(begun, 1):
        if index == 1 and back is not None:
            must, may = ({one: kept for one, kept in own.items() if one <= back} for own in (must, may))
        must, may = must | {step: value}, may | {step: value}
        removed = removed_steps(must, in_use={step}, **KEEP)
        must = {one: kept for one, kept in must.items() if one not in removed}
        if index >= num_whole:
            yield must, may


def problems_of(before, found, lines):
    """Sentences about checkpoints that must not be there, or are missing."""
    for must, may in allowed(before, lines):
        if must.items() <= found.items() <= may.items():
            return []
    return [f"found {found}, after {before} and {lines}"]


def main():
    place, reports, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(count)
    problems, before = [], {}
    for number in range(1, count + 1):
        path = reports / str(number)
        pid = fork(partial(work, place, number, path))
        while not (path.exists() and b"begin" in path.read_bytes()):
            time.sleep(0.005)
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                raise RuntimeError("a job has ended by itself")
        if number % 5 == 0:
            other = fork(partial(refused, place))
            if os.waitpid(other, 0)[1] != 0:
                problems.append("a second job was not refused")
        time.sleep(draw.random() * 0.3)
        if draw.random() < 0.5:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if lines[0] != ["latest", max(before, default=None)]:
            problems.append(f"{lines[0]} after {before}")
        found = dict(ended(partial(checkpoints_in, place), reports / "found"))
        problems += problems_of(before, found, lines)
        before = found
    print(json.dumps([problems, ended(partial(left_in, place), reports / "left")]))


if __name__ == "__main__":
    main()
