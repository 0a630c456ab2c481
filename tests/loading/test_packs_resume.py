"""A run over packs that is killed again and again, and resumes on other ranks with the same documents in each step."""

import hashlib
import itertools
import json
import os
import random
import signal
import time
import warnings

import numpy as np
import pytest

from tests.support.tiers import slow_but
from trackbed import BatchLoader, open_blend
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.trained_tokens import TrainedColumns, runs_of

GLOBAL_BATCH, MULTIPLE = 24, 8
BLEND = f"""version = 1
sequence_length = 64
order = "packed"
split = "1"
tokenizer = "null:1000000"
size = {{train = 1_000_000}}
[options]
pack_multiple = {MULTIPLE}
pack_window = 150
"""
JOBS = [
    {"num_ranks": ranks, "batch_size": batch, "context_size": context, "balanced": balanced}
    for ranks, batch, context, balanced in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4), (1, 2, 4), (False, True))
    if GLOBAL_BATCH % (ranks * batch) == 0 and ranks * context <= 8
]


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    """Three pairs of documents, of which no two have a token in common, and about half of whose tokens are trained."""
    folder, rng, first = tmp_path_factory.mktemp("resume"), np.random.default_rng(2), 1
    text = BLEND
    for number in range(3):
        builder = IndexedDatasetBuilder(f"{folder / str(number)}.bin", np.int32)
        builder.trained = TrainedColumns()
        for length in rng.integers(2, 30 * (number + 1), 400).tolist():
            runs = runs_of(rng.random(length) < 0.5)
            builder.add_document(np.arange(first, first + length), [length])
            builder.trained.add(np.array([len(runs)]), runs, lengths=np.array([length]), where="mask")
            first += length
        builder.finalize(f"{folder / str(number)}.idx")
        text += f'[[dataset]]\npath = "{number}"\nweight = {number + 1}\n'
    (folder / "blend.toml").write_text(text)
    return folder / "blend.toml"


def loaders_of(blend, *, num_ranks, batch_size, context_size, balanced, ahead):
    """The loaders of all ranks of a job."""
    balance = {"balanced": True, "global_batch_size": GLOBAL_BATCH, "hidden_size": 64} if balanced else {}
    train = open_blend(blend).train
    options = {"num_ranks": num_ranks, "batch_size": batch_size, "context_size": context_size, "ahead": ahead}
    return [
        BatchLoader(train, layout="thd", num_threads=1, rank=rank, context_rank=context_rank, **options, **balance)
        for rank in range(num_ranks)
        for context_rank in range(context_size)
    ]


def steps_of(blend, job, state=None):
    """Yields a hash of all documents and trained labels of each step, and the state behind it."""
    loaders = loaders_of(blend, **job)
    for loader in loaders if state else []:
        loader.load_state_dict(state)
    batches = [iter(loader) for loader in loaders]
    while True:
        found = []
        for _ in range(GLOBAL_BATCH // (job["num_ranks"] * job["batch_size"])):
            for one in map(next, batches):
                own = ~one["padding_mask"]
                found.append(np.stack([one["tokens"][own], one["loss_mask"][own] * one["labels"][own]]))
        together = np.concatenate(found, axis=1)
        together = together[:, np.lexsort(together)]
        yield hashlib.sha256(together.tobytes()).hexdigest()[:16], loaders[0].state_dict()


def run(blend, folder, job, rng):
    """Logs the steps from the newest state on, and saves the state behind some of them, until it is killed."""
    kept = folder / "state.json"
    step, state = json.loads(kept.read_text()) if kept.exists() else (0, None)
    log = os.open(folder / "steps.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, (found, after) in enumerate(steps_of(blend, job, state), start=step):
        os.write(log, f"{number} {found}\n".encode())  # a whole line, whenever it is killed
        if rng.random() < 0.3:
            (folder / "new.json").write_text(json.dumps([number + 1, after]))
            (folder / "new.json").replace(kept)
        time.sleep(0.002)


def killed(function, seconds):
    """Runs a function in a process of its own, which is killed after a while."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child does not meet the locks of other threads
        child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL  # it had not ended by itself


@pytest.mark.parametrize("kills", slow_but([4], [4, 50]))
def test_steps_keep_their_documents_after_kills_on_other_ranks(blend, tmp_path, kills):
    rng = random.Random(kills)
    ends = []
    for _ in range(kills):
        job = {**rng.choice(JOBS), "ahead": rng.randint(1, 4)}
        own = random.Random(rng.random())
        killed(lambda job=job, own=own: run(blend, tmp_path, job, own), rng.uniform(0.3, 1.2))
        ends.append(len((tmp_path / "steps.txt").read_text().splitlines()))
    lines = [line.split() for line in (tmp_path / "steps.txt").read_text().splitlines()]
    last = max(int(step) for step, _ in lines)
    plain = {"num_ranks": 1, "batch_size": GLOBAL_BATCH, "context_size": 1, "balanced": False, "ahead": 1}
    wanted = [found for found, _ in itertools.islice(steps_of(blend, plain), last + 1)]
    assert len(set(wanted)) == len(wanted)
    assert {int(step) for step, _ in lines} == set(range(last + 1))
    assert [found for _, found in lines] == [wanted[int(step)] for step, _ in lines]
    assert len(lines) > last + 1  # some steps were made again
    assert len(set(ends)) >= kills - max(1, kills // 10)  # nearly all jobs came to train
    _, state = json.loads((tmp_path / "state.json").read_text())
    assert len(json.dumps(state)) <= 1024
