"""The proof of "same bytes": generated configurations, given to Megatron Core and to Trackbed."""

import os
import shutil
import warnings
from collections import Counter

import pytest
from cases import cases
from hypothesis import HealthCheck, Phase, given, settings
from oracle import ask_trackbed, running

import trackbed.megatron  # noqa: F401  its finder makes trackbed.megatron.core importable

FULL = os.environ.get("TRACKBED_TIER") == "full"
_SETTINGS = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
    "print_blob": False,
}


@pytest.fixture(scope="module")
def oracle():
    with running() as started:
        yield started


def stamps(folder):
    """What changes when a file is written again."""
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.rglob("*") if p.is_file()}


def verdict(ours, theirs):
    """`identical`, `refused by both` or `refused by the oracle only`; a failed assertion for anything else."""
    if "error" in theirs:
        return "refused by both" if "error" in ours else "refused by the oracle only"
    assert "error" not in ours, f"Megatron Core gives a usable dataset, Trackbed says: {ours['error']}"
    assert ours["files"] == theirs["files"]
    return max(
        (_compare(mine, other) for mine, other in zip(ours["datasets"], theirs["datasets"], strict=True)),
        key=["identical", "refused by the oracle only"].index,
    )


def _compare(ours, theirs):
    """Everything is equal, but for samples that the oracle fails to read."""
    if isinstance(theirs, list):
        found = [_compare(mine, other) for mine, other in zip(ours, theirs, strict=True)]
        return "refused by the oracle only" if "refused by the oracle only" in found else "identical"
    if theirs is None:
        assert ours is None
        return "identical"
    failed = {position for position, value in theirs["samples"].items() if str(value).startswith("error")}
    kept = [position for position in theirs["samples"] if position not in failed]
    assert {**ours, "samples": None, "members": None} == {**theirs, "samples": None, "members": None}
    assert [ours["samples"][position] for position in kept] == [theirs["samples"][position] for position in kept]
    inner = _compare(ours.get("members", []), theirs.get("members", []))
    return "refused by the oracle only" if failed else inner


def judge(case, folder, oracle):
    """Ask both, compare, and let each start from the other's cache."""
    shutil.rmtree(folder, ignore_errors=True)
    case.write(folder / "data")
    mine, theirs = folder / "ours", folder / "theirs"
    first = ask_trackbed(case.request(folder / "data", mine))
    second = oracle.ask(case.request(folder / "data", theirs))
    found = verdict(first, second)
    if found == "identical":
        before = stamps(mine), stamps(theirs)
        assert oracle.ask(case.request(folder / "data", mine)) == second
        assert ask_trackbed(case.request(folder / "data", theirs)) == first
        assert (stamps(mine), stamps(theirs)) == before, "a cache was built again"
    return found


def run(examples, tmp_path, oracle, record_property):
    """Judge that many configurations, and record how many were what."""
    counts = Counter()

    @settings(max_examples=examples, derandomize=not FULL, **_SETTINGS)
    @given(cases())
    def check(case):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about ambiguous padding
            counts[judge(case, tmp_path / "case", oracle)] += 1

    check()
    record_property("conformance with megatron-core 0.16.1", dict(counts))
    return counts


def test_100_configurations_are_identical(tmp_path, oracle, record_property):
    assert run(170, tmp_path, oracle, record_property)["identical"] >= 100


@pytest.mark.slow
def test_300_configurations_are_identical(tmp_path, oracle, record_property):
    assert run(600, tmp_path, oracle, record_property)["identical"] >= 300
