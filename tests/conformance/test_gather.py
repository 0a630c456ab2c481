"""Whole batches against Megatron Core's samples, for generated configurations."""

import os
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import trackbed.megatron  # noqa: F401  its finder makes trackbed.megatron.core importable
from tests.support.files.tidy import remove_folder
from tests.support.megatron_core.cases import cases
from tests.support.megatron_core.observe import digest
from tests.support.megatron_core.oracle import build_with_trackbed, running
from trackbed.errors import ArgumentError, TrackbedError

FULL = os.environ.get("TRACKBED_TIER") == "full"


@pytest.fixture(scope="module")
def oracle():
    with running() as started:
        yield started


def compare(dataset, theirs):
    """How many of the oracle's samples equal the rows of a batch; a failed assertion if one does not."""
    if theirs is None:
        return 0
    if isinstance(theirs, list):
        return sum(compare(one, other) for one, other in zip(dataset, theirs, strict=True))
    read = {at: found for at, found in theirs["samples"].items() if at != "None" and isinstance(found, list)}
    batch = dataset.gather([int(at) for at in read]) if read else {}
    for row, found in enumerate(read.values()):
        assert [[name, digest(tensor[row])] for name, tensor in batch.items()] == found
    members = zip(getattr(dataset, "datasets", ()), theirs.get("members", ()), strict=True)
    return len(read) + sum(compare(one, other) for one, other in members)


def run(examples, folder, oracle):
    """How many samples were identical in that many configurations."""
    counts = []

    @settings(
        max_examples=examples,
        derandomize=not FULL,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        print_blob=False,
    )
    @given(cases())
    def check(case):
        remove_folder(folder)
        case.write(folder / "data")
        theirs = oracle.ask(case.request(folder / "data", folder / "theirs"))
        if "error" in theirs:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about ambiguous padding
            try:
                built = build_with_trackbed(case.request(folder / "data", folder / "ours"))
            except (ArgumentError, TrackbedError):
                return  # what Trackbed refuses is judged elsewhere
        counts.append(compare(built, theirs["datasets"]))

    check()
    return sum(counts)


def test_rows_of_batches_are_megatron_cores_samples(tmp_path, oracle):
    assert run(40, tmp_path / "case", oracle) >= 300


@pytest.mark.slow
def test_rows_of_many_batches_are_megatron_cores_samples(tmp_path, oracle):
    assert run(300, tmp_path / "case", oracle) >= 3000
