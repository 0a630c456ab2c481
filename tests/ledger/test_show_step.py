"""`trackbed show --run` says of each rank what it was fed."""

import hashlib
import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import trackbed
from tests.support.files.built_pair import build
from tests.support.processes.launching import run_script
from tests.support.tiers import slow_but
from trackbed.cli.main import trackbed as trackbed_command
from trackbed.errors import ArgumentError
from trackbed.loading import provenance

RANK = Path(__file__).parent / "fed_rank.py"
JOBS = ((2, 12), (1, 18), (2, 24))
"""Ranks of each job, and its last step; each begins two steps before the end of the one before."""


@pytest.fixture(scope="module")
def fed(folder, tmp_path_factory):
    """The folder of a run, and digests of the samples of each rank, by step and rank."""
    place = tmp_path_factory.mktemp("fed")
    found = {}
    for num_ranks, last in JOBS:
        lines = run_script(RANK, num_ranks, folder, place / "run", last, place / "state.json", limit_seconds=60)
        for rank, (digests,) in enumerate(lines):
            for step in digests:
                found = {place_of: one for place_of, one in found.items() if place_of[0] != int(step) or rank}
                found[int(step), rank] = digests[step]
    return place / "run", found


def digest(sample):
    return hashlib.sha256(sample["tokens"].numpy().astype("<i8").tobytes()).hexdigest()


@pytest.mark.dist
@pytest.mark.parametrize("count", slow_but([8], [8, 100]))
def test_the_samples_of_a_rank_are_those_that_it_was_fed(folder, fed, count):
    run, digests = fed
    dataset = trackbed.open_blend(folder / "blend.toml").train
    assert {step for step, _ in digests} == set(range(1, JOBS[-1][1] + 1))
    places = random.Random(1).choices(sorted(digests), k=count)
    for step, rank in places:
        words = ["show", "--run", str(run), "--step", str(step), "--rank", str(rank), "--json"]
        samples = json.loads(CliRunner().invoke(trackbed_command, words).stdout)["samples"]
        assert [digest(dataset[sample["position"]]) for sample in samples] == digests[step, rank], (step, rank)
        for sample in samples:
            for origin in sample["origins"]:
                del origin["text"]
            assert sample == json.loads(json.dumps(asdict(provenance(dataset, sample["position"]))))


PACKED = """version = 1
sequence_length = 64
order = "packed"
split = "1"
size = {train = 400}
tokenizer = {eod = 0, vocab_size = 1000}

[[dataset]]
path = "a"
weight = 3

[[dataset]]
path = "b"
weight = 1
"""


@pytest.mark.dist
def test_balanced_ranks_have_the_gradients_of_others_and_show_knows_their_samples(tmp_path):
    lengths = np.random.default_rng(5).integers(2, 90, 300).tolist()
    for name in "ab":
        build(tmp_path / name, [np.arange(one, one + length) % 900 + 1 for one, length in enumerate(lengths)])
    (tmp_path / "packed.toml").write_text(PACKED)
    script = Path(__file__).parent / "balanced_rank.py"
    ranks = [line for (line,) in run_script(script, 2, tmp_path / "packed.toml", tmp_path / "run", limit_seconds=60)]
    for found in ranks:
        assert found["is_other"]
        assert found["worst"] <= 1e-12 * min(1, found["largest"])
    dataset = trackbed.open_blend(tmp_path / "packed.toml").train
    for step in (1, 2, 3):
        words = ["show", "--run", str(tmp_path / "run"), "--step", str(step), "--json"]
        whole = json.loads(CliRunner().invoke(trackbed_command, words).stdout)["samples"]
        parts = []
        for rank, own in enumerate(ranks):
            samples = json.loads(CliRunner().invoke(trackbed_command, [*words, "--rank", str(rank)]).stdout)["samples"]
            assert [digest(dataset[sample["position"]]) for sample in samples] == own["fed"][str(step)], (step, rank)
            parts += [sample["position"] for sample in samples]
        assert sorted(parts) == [sample["position"] for sample in whole]


def test_a_step_of_a_balanced_run_is_whole(tmp_path):
    build(tmp_path / "a", [range(1, 40)] * 40)
    shutil.copy(tmp_path / "a.bin", tmp_path / "b.bin")
    shutil.copy(tmp_path / "a.idx", tmp_path / "b.idx")
    (tmp_path / "packed.toml").write_text(PACKED)
    with trackbed.open_run(tmp_path / "run", blend=tmp_path / "packed.toml") as run:
        batches = iter(run.loader(batch_size=2, balanced=True, global_batch_size=8, hidden_size=64))
        for number in range(1, 9):
            next(batches)
            if number % 4:
                with pytest.raises(ArgumentError, match=f"whole global batches of 8 samples, found {2 * number}"):
                    run.record(0.5)
        run.record(0.5)
        assert run.step == 1
