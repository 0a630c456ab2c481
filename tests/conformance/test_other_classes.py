"""Classes whose constructors build files on rank 0, on several ranks: the datasets of Megatron Core's builder."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes.launching import run_script
from trackbed.tokens import IndexedDatasetBuilder

pytestmark = pytest.mark.slow

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


def reversed_cases():
    """Cases in which rank 0 wants no datasets."""
    return [{**case, "refuses": 0} for case in cases("rank1") if case["class"] == "Reversed"]


def broken_cases(size):
    """Cases in which the constructor of a rank raises."""
    return [
        {"class": name, "cache": f"broken-{size}-{name}-{rank}", "raises": rank, **BLENDS[1]}
        for name in ("Sequences", "Shifted")
        for rank in (0, size - 1)
    ]


GENERIC_CASES = [
    {"class": "generic", "synchronize": True, "cache": "generic0"},
    {"class": "generic", "synchronize": True, "cache": "generic1", "refuses": 1},
    {"class": "generic", "synchronize": False, "cache": "generic2"},
    {"class": "generic", "synchronize": True, "cache": "generic3", "raises": 0},
    {"class": "generic", "synchronize": True, "cache": "generic4", "raises": 1},
]


@pytest.fixture(scope="module")
def theirs(folder):
    found = ask("megatron", folder, 1, cases("theirs"))[0]
    assert not any("error" in answer for answer in found), found
    return found


@pytest.fixture(scope="module")
def on_two_ranks(folder):
    """Answers of two ranks to the cases of each kind."""
    kinds = {
        "same": cases("ours-2"),
        "reversed": reversed_cases(),
        "broken": broken_cases(2),
        "generic": GENERIC_CASES,
    }
    ranks = ask("trackbed", folder, 2, [case for of_kind in kinds.values() for case in of_kind])
    answers = [iter(rank) for rank in ranks]
    return {kind: [list(islice(one, len(of_kind))) for one in answers] for kind, of_kind in kinds.items()}


def test_other_peoples_classes_give_the_datasets_of_megatron_core(on_two_ranks, theirs):
    assert on_two_ranks["same"] == [theirs] * 2


@pytest.mark.parametrize("size", [1, 4])
def test_so_they_do_on_other_numbers_of_ranks(size, folder, theirs):
    assert ask("trackbed", folder, size, cases(f"ours-{size}")) == [theirs] * size


def test_a_rank_without_datasets_takes_part(on_two_ranks, theirs):
    refused, answers = on_two_ranks["reversed"]
    assert all(answer == {"datasets": [None] * 3} for answer in refused)
    wanted = zip(cases("theirs"), theirs, strict=True)
    assert answers == [answer for case, answer in wanted if case["class"] == "Reversed"]


def check_broken(of_ranks, size):
    for answers in of_ranks:
        for case, answer in zip(broken_cases(size), answers, strict=True):
            assert f"rank {case['raises']}: KeyError: 'lost'" in answer["error"]
            assert answer["seconds"] < 5


def test_a_constructor_that_raises_on_one_rank_is_raised_on_all(on_two_ranks):
    check_broken(on_two_ranks["broken"], 2)


def test_a_constructor_that_raises_on_one_of_four_ranks_is_raised_on_all(folder):
    check_broken(ask("trackbed", folder, 4, broken_cases(4)), 4)


def test_build_generic_dataset_calls_rank_0_first_or_communicates_with_none(on_two_ranks):
    first, last = on_two_ranks["generic"]
    assert [answer.get("made") for answer in first[:3]] == ["made", "made", None]
    assert [answer.get("made") for answer in last[:3]] == ["made", None, "made"]
    for answers in (first, last):
        for rank, answer in enumerate(answers[3:]):
            assert f"building a dataset: rank {rank}: KeyError: 'lost'" in answer["error"]
            assert answer["seconds"] < 5
