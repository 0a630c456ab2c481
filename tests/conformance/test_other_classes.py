"""Classes whose constructors build files on rank 0, on several ranks: the datasets of Megatron Core's builder."""

import json
from pathlib import Path

import numpy as np
import pytest

from launching import run_script
from trackbed.tokens import IndexedDatasetBuilder

pytestmark = pytest.mark.dist

RANK = Path(__file__).with_name("other_classes_rank.py")
LIMIT_SECONDS = 200
BLENDS = [
    {"blend": ["a"], "sizes": [100, 10, 10]},
    {"blend": ["a", "b"], "weights": True, "sizes": [100, 10, 10]},
    {"blend": ["a", "b"], "sizes": [None, None, None]},
]
CLASSES = ["Sequences", "Shifted", "Reversed", "BERTMaskedWordPieceDataset"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two pairs of documents of several sentences."""
    path = tmp_path_factory.mktemp("pairs")
    for seed, name in enumerate("ab"):
        rng = np.random.default_rng(seed)
        builder = IndexedDatasetBuilder(f"{path / name}.bin", np.uint16)
        for _ in range(120):
            lengths = rng.integers(3, 12, rng.integers(2, 6))
            builder.add_document(rng.integers(0, 100, lengths.sum()), lengths.tolist())
        builder.finalize(f"{path / name}.idx")
    return path


def ask(program, folder, size, cases):
    """What each rank answers to each case."""
    return run_script(RANK, size, program, folder, json.dumps(cases), limit_seconds=LIMIT_SECONDS)


def cases(cache):
    found = [
        {"class": name, "cache": f"{cache}-{number}", **blend}
        for name in CLASSES
        for number, blend in enumerate(BLENDS)
        # Megatron Core's masked datasets cannot take all of a file.
        if not (name.startswith("BERT") and blend["sizes"][0] is None)
    ]
    return found + found[::3]  # some again, from a cache that is there


@pytest.fixture(scope="module")
def theirs(folder):
    return ask("megatron", folder, 1, cases("theirs"))[0]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
def test_other_peoples_classes_give_the_datasets_of_megatron_core(size, folder, theirs):
    assert not any("error" in answer for answer in theirs), theirs
    for answers in ask("trackbed", folder, size, cases(f"ours-{size}")):
        assert answers == theirs


def test_a_rank_without_datasets_takes_part(folder, theirs):
    wanted = [{**case, "refuses": 0} for case in cases("rank1") if case["class"] == "Reversed"]
    refused, answers = ask("trackbed", folder, 2, wanted)
    assert all(answer == {"datasets": [None] * 3} for answer in refused)
    assert answers == [
        answer for case, answer in zip(cases("theirs"), theirs, strict=True) if case["class"] == "Reversed"
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_constructor_that_raises_on_one_rank_is_raised_on_all(size, folder):
    broken = [
        {"class": name, "cache": f"broken-{size}-{name}-{rank}", "raises": rank, **BLENDS[1]}
        for name in ("Sequences", "Shifted")
        for rank in (0, size - 1)
    ]
    for answers in ask("trackbed", folder, size, broken):
        for case, answer in zip(broken, answers, strict=True):
            assert f"rank {case['raises']}: KeyError: 'lost'" in answer["error"]
            assert answer["seconds"] < 5


def test_build_generic_dataset_calls_rank_0_first_or_communicates_with_none(folder):
    asked = [
        {"class": "generic", "synchronize": True, "cache": "generic0"},
        {"class": "generic", "synchronize": True, "cache": "generic1", "refuses": 1},
        {"class": "generic", "synchronize": False, "cache": "generic2"},
        {"class": "generic", "synchronize": True, "cache": "generic3", "raises": 0},
        {"class": "generic", "synchronize": True, "cache": "generic4", "raises": 1},
    ]
    first, last = ask("trackbed", folder, 2, asked)
    assert [answer.get("made") for answer in first[:3]] == ["made", "made", None]
    assert [answer.get("made") for answer in last[:3]] == ["made", None, "made"]
    for answers in (first, last):
        for rank, answer in enumerate(answers[3:]):
            assert f"building a dataset: rank {rank}: KeyError: 'lost'" in answer["error"]
            assert answer["seconds"] < 5
