"""The proof of "same bytes": generated configurations, given to Megatron Core and to Trackbed."""

import os
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import trackbed.megatron  # noqa: F401  its finder makes trackbed.megatron.core importable
from tests.support.files.tidy import remove_folder
from tests.support.megatron_core.cases import Case, Data, cases, flags
from tests.support.megatron_core.oracle import ask_trackbed, build_with_trackbed, running
from tests.support.megatron_core.release import RELEASE

NEWER_THAN_0_10 = ("mid_level_dataset_surplus", "allow_ambiguous_pad_tokens", "inter_document_masking")
OUR_ERRORS = ("ArgumentError", "FormatError", "OversampleError", "PlanError")
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
    """What changes when a file is written again; without notes, which are written in the background."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "notes"]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


def verdict(ours, theirs):
    """`identical`, `refused by both` or `refused by the oracle only`; a failed assertion for anything else."""
    if "error" in theirs:
        assert "error" not in ours or ours["error"].split(":")[0] in OUR_ERRORS, ours["error"]
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


def _broken(dataset):
    """Positions inside a dataset at which the oracle fails to read."""
    samples = dataset["samples"].items()
    return [at for at, found in samples if int(at) < dataset["length"] and str(found).startswith("error")]


def judge(case, folder, oracle, *, legacy=False):
    """Ask both, compare, and let each start from the other's cache."""
    remove_folder(folder)
    case.write(folder / "data")
    mine, theirs = folder / "ours", folder / "theirs"
    first = ask_trackbed(case.request(folder / "data", mine), legacy=legacy)
    second = oracle.ask(case.request(folder / "data", theirs))
    if first.get("error", "").startswith("OversampleError") and "error" not in second:
        # Core 0.10 looks at the last sample only. What Trackbed refuses has to fail there too, at some other one.
        every = list(range(max(dataset["length"] for dataset in second["datasets"] if dataset)))
        whole = oracle.ask({**case.request(folder / "data", theirs), "positions": every})
        broken = [name for one in whole["datasets"] if one for name in _broken(one)]
        assert broken, f"Megatron Core reads every sample, Trackbed says: {first['error']}"
        return "refused by both"
    found = verdict(first, second)
    if found == "identical":
        before = stamps(mine), stamps(theirs)
        assert oracle.ask(case.request(folder / "data", mine)) == second
        assert ask_trackbed(case.request(folder / "data", theirs), legacy=legacy) == first
        assert (stamps(mine), stamps(theirs)) == before, "a cache was built again"
    return found


def run(examples, tmp_path, oracle, record_property, *, version=RELEASE, configurations=None):
    """Judge that many configurations, and record how many were what."""
    counts = Counter()

    @settings(max_examples=examples, derandomize=not FULL, **_SETTINGS)
    @given(cases() if configurations is None else configurations)
    def check(case):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about ambiguous padding
            counts[judge(case, tmp_path / "case", oracle, legacy=version == "0.10.0")] += 1

    check()
    record_property(f"conformance with megatron-core {version}", dict(counts))
    return counts


def test_100_configurations_are_identical(tmp_path, oracle, record_property):
    assert run(150, tmp_path, oracle, record_property)["identical"] >= 100


@pytest.mark.slow
def test_300_configurations_are_identical(tmp_path, oracle, record_property):
    assert run(600, tmp_path, oracle, record_property)["identical"] >= 300


# Core 0.10 makes a blend of nine samples, of which it cannot read the fifth and the seventh.
OVERSAMPLED = Case(
    data=(
        Data(seed=54034, documents=23, longest=3, empty=0.0, dtype="int32"),
        Data(seed=324, documents=1, longest=9, empty=0.0, dtype="uint16"),
        Data(seed=10577, documents=2000, longest=2, empty=0.5, dtype="uint16"),
        Data(seed=7571, documents=2000, longest=3, empty=0.0, dtype="uint16"),
        Data(seed=3628800, documents=2000, longest=9, empty=0.5, dtype="int32"),
        Data(seed=2672, documents=120, longest=2, empty=0.1, dtype="uint16"),
        Data(seed=173174, documents=78, longest=2, empty=0.0, dtype="uint16"),
    ),
    sequence_length=3,
    blends=((tuple(range(7)), (0.7577062216693158, 84, 0.7360509494473446, 1.0, 0.7394548580693059, 1.0, 67)),),
    split="1",
    sizes=(3, 4, 0),
    tokenizer="null",
    options={
        **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "renormalize_blend_weights"), False),
        "eod_mask_loss": True,
        "add_extra_token_to_sequence": False,
        "random_seed": 2267,
    },
)


@pytest.mark.slow
def test_the_sizes_weights_and_names_of_core_0_10_are_identical(tmp_path, record_property):
    """`renormalize_blend_weights`, against megatron-core 0.10.0 in a folder of its own."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "core")]
    # Name servers, which tests do not ask, are asked for the registry.
    environment = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    subprocess.run([*pip, "megatron-core==0.10.0"], check=True, capture_output=True, env=environment)
    options = flags().flatmap(
        lambda known: st.booleans().map(
            lambda renormalize: {
                **{name: value for name, value in known.items() if name not in NEWER_THAN_0_10},
                "renormalize_blend_weights": renormalize,
            }
        )
    )
    configurations = cases(options=options).map(lambda case: replace(case, tokenizer="null"))
    with running(tmp_path / "core") as oracle:
        assert judge(OVERSAMPLED, tmp_path / "oversampled", oracle, legacy=True) == "refused by both"
        counts = run(150, tmp_path, oracle, record_property, version="0.10.0", configurations=configurations)
    assert counts["identical"] >= 100


def test_a_samples_loss_mask_does_not_depend_on_what_was_read_before(tmp_path):
    """Megatron Core's does: the first sample's padding stays in the mask of all that follow."""
    case = Case(
        data=(Data(seed=1, documents=40, longest=30, empty=0.0, dtype="uint16"),),
        sequence_length=16,
        blends=(((0,), None),),
        split="1",
        sizes=(None, None, None),
        tokenizer="common",
        options={
            **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
            "random_seed": 1,
        },
    )
    case.write(tmp_path / "data")
    request = case.request(tmp_path / "data", tmp_path / "cache")
    masks = []
    for order in (range(20), reversed(range(20))):
        dataset = build_with_trackbed(request)[0]
        masks.append({position: dataset[position]["loss_mask"].tolist() for position in order})
    assert masks[0] == masks[1]
    assert any(0.0 in mask for mask in masks[0].values())
