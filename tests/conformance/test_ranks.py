"""Indices that several ranks build together, against those of Megatron Core."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trackbed.megatron  # noqa: F401  its finder makes trackbed.megatron.core importable
from tests.support.files.tidy import remove_folder
from tests.support.megatron_core.cases import cases
from tests.support.megatron_core.oracle import ask_ranks, running

QUICK = settings(max_examples=max(settings().max_examples // 2, 25))


@pytest.fixture(scope="module")
def oracle():
    with running() as started:
        yield started


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the padding id")
@given(case=cases(), size=st.sampled_from([1, 2, 4, 8]), threads=st.sampled_from([1, 2]))
@QUICK
def test_ranks_build_the_files_and_samples_of_megatron_core(case, size, threads, oracle, tmp_path):
    folder = tmp_path / "case"
    remove_folder(folder)
    case.options["num_dataset_builder_threads"] = threads
    case.write(folder / "data")
    theirs = oracle.ask(case.request(folder / "data", folder / "theirs"))
    ours = ask_ranks(case.request(folder / "data", folder / "ours"), size)
    if "error" in theirs:
        return  # test_datasets says what is refused
    for rank in ours:
        assert rank["files"] == theirs["files"]
        if not any("error" in str(dataset) for dataset in theirs["datasets"]):
            assert rank["datasets"] == theirs["datasets"]
