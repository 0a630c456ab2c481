"""`trackbed show --run` says of each rank what it was fed."""

import hashlib
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

import trackbed
from tests.support.processes.launching import run_script
from tests.support.tiers import slow_but
from trackbed.cli.main import trackbed as trackbed_command
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
