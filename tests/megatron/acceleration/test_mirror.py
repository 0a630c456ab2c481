"""Programs that build their datasets through `megatron.core`, with Trackbed's functions and without."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.files.tidy import remove_folder
from tests.support.megatron_core.cases import Case, Data, cases
from tests.support.processes.launching import run_script
from tests.support.tiers import slow_but

RANK = Path(__file__).with_name("builds_rank.py")
LIMIT_SECONDS = 300
FLAGS = {
    **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
    "random_seed": 1234,
    "num_dataset_builder_threads": 2,
}
PAIRS = tuple(Data(seed, documents, 60, 0.1, "uint16") for seed, documents in enumerate((150, 300, 1000)))
ALL = (0, 1, 2)
ONE = Case(PAIRS, 64, ((ALL, (0.2, 0.5, 0.3)),), "80,10,10", (900, 20, 30), "null", FLAGS)
CASES = [
    ONE,
    replace(ONE, sizes=(90, 20, 30), tokenizer="padded"),
    replace(ONE, blends=((ALL, None),), sizes=(None, None, None)),
    replace(ONE, blends=((ALL, None),), sizes=(300, 20, None)),
    replace(ONE, blends=(((1,), None),), sizes=(2000, 17, 0)),
    replace(ONE, blends=(((1,), (1.0,)),), sizes=(400, 17, 3)),
    replace(
        ONE,
        options={**FLAGS, "drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": False},
    ),
    replace(
        ONE,
        blends=((ALL, (0.2, 0.5, 0.3)), ((0, 2), None), None),
        split=None,
        sizes=(700, None, 5),
        options={**FLAGS, "multiple_validation_sets": True, "full_validation": True},
    ),
]
NAMES = [
    "megatron.core.datasets.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder.build",
    "megatron.core.datasets.gpt_dataset._build_document_index",
    "megatron.core.datasets.gpt_dataset._build_shuffle_index",
    "megatron.core.datasets.helpers.build_blending_indices",
    "megatron.core.datasets.helpers.build_exhaustive_blending_indices",
    "megatron.core.datasets.helpers.build_sample_idx",
]


def build(when, size, folder, found):
    """What each rank answers for each case, and the names of what was replaced there."""
    return ask(
        when,
        size,
        folder,
        [case.request(folder / str(number), folder / f"{when}-{size}-{number}") for number, case in enumerate(found)],
    )


def ask(when, size, folder, requests):
    """What each rank answers to each request, and the names of what was replaced there."""
    file = folder / f"{when}-{size}.json"
    file.write_text(json.dumps(requests))
    *answers, names = zip(*run_script(RANK, size, when, file, limit_seconds=LIMIT_SECONDS), strict=True)
    return answers, names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The pairs of all cases."""
    path = tmp_path_factory.mktemp("cases")
    for number, case in enumerate(CASES):
        case.write(path / str(number))
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    """What Megatron Core alone makes of them."""
    answers, names = build("never", 1, folder, CASES)
    assert names == ([],)
    assert all(saved > 0 and "error" not in answered for ((answered, saved),) in answers)
    return [answered for ((answered, _),) in answers]


@pytest.mark.parametrize(
    ("when", "size"),
    slow_but([("before", 1)], [(when, size) for when in ("before", "after") for size in (1, 2)]),
)
def test_files_and_samples_are_those_of_megatron_core_which_builds_nothing(when, size, folder, theirs):
    answers, names = build(when, size, folder, CASES)
    assert names == (NAMES,) * size
    for of_ranks, wanted in zip(answers, theirs, strict=True):
        assert of_ranks == ([wanted, 0],) * size


def test_after_undo_megatron_core_builds_alone(folder, theirs):
    answers, names = build("undone", 1, folder, CASES[:2])
    assert names == ([],)
    for ((answered, saved),), wanted in zip(answers, theirs[:2], strict=True):
        assert answered == wanted
        assert saved > 0


@pytest.mark.slow
def test_all_ranks_build_alike_and_raise_alike(folder, theirs):
    """One rank cannot be mirrored, so that Megatron Core builds alone; and a pair is missing."""
    data = folder / "0"
    counts = {str(data / str(number)): (one.documents, one.documents + 1) for number, one in enumerate(PAIRS)}
    unlike = {**ONE.request(data, folder / "unlike"), "of_rank": {"1": {"sequences_per_dataset": counts}}}
    lacking = ONE.request(folder / "nothing", folder / "lacking")
    ((first, other), errors), _ = ask("before", 2, folder, [unlike, lacking])
    assert first[0] == other[0] == theirs[0]
    assert first[1] > 0 == other[1]
    assert errors[0] == errors[1]
    assert errors[0][0]["error"].startswith("CollectiveError: building the indices: ")
    assert f"{folder / 'nothing'}" in errors[0][0]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@given(found=st.lists(cases(), min_size=25, max_size=25))
@settings(max_examples=2, phases=[Phase.generate])  # an example takes a minute
def test_any_datasets_are_those_of_megatron_core(size, found, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    for number, case in enumerate(found):
        case.write(folder / str(number))
    ours, _ = build("before", 1, folder, found)
    # Where Trackbed finds no tokens, Megatron Core would look for them without end.
    told = [
        case
        for case, ((answered, _),) in zip(found, ours, strict=True)
        if not answered.get("error", "").startswith("PlanError: ")
    ]
    assert len(told) > len(found) // 2
    remove_folder(folder)
    folder.mkdir()
    for number, case in enumerate(told):
        case.write(folder / str(number))
    wanted, _ = build("never", 1, folder, told)
    # What Megatron Core refuses stops its first rank alone.
    refused = ["error" in alone for ((alone, _),) in wanted]
    shown = range(len(told)) if size == 1 else [number for number, is_refused in enumerate(refused) if not is_refused]
    requests = [told[number].request(folder / str(number), folder / f"ours-{number}") for number in shown]
    answers, _ = ask("after", size, folder, requests)
    for number, of_ranks in zip(shown, answers, strict=True):
        alone = wanted[number][0][0]
        if not refused[number]:
            assert of_ranks == ([alone, 0],) * size
        elif of_ranks[0][0].get("error", "").startswith("OversampleError: "):
            assert alone["error"].startswith("IndexError: ")
        elif "error" in of_ranks[0][0]:
            assert of_ranks[0][0] == alone
        else:  # the last document that is visited is empty
            assert alone["error"] == "AssertionError: "
