"""The proof of "same bytes" for BERT and T5: generated configurations, given to Megatron Core and to Trackbed."""

import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset as MegatronT5

import trackbed.megatron  # noqa: F401  its finder makes trackbed.megatron.core importable
from tests.conformance.test_datasets import _SETTINGS, FULL, stamps, verdict
from tests.support.files.tidy import remove_folder
from tests.support.megatron_core.masked_cases import masked_cases
from tests.support.megatron_core.oracle import ask_ranks, ask_trackbed, running
from trackbed.datasets import T5MaskedWordPieceDataset


@pytest.fixture(scope="module")
def oracle():
    with running() as started:
        yield started


def judge(case, folder, oracle):
    """Ask both, on one rank and two, compare, and let each start from the other's cache."""
    remove_folder(folder)
    case.write(folder / "data")
    mine, theirs, two = folder / "ours", folder / "theirs", folder / "two"
    second = oracle.ask(case.request(folder / "data", theirs))
    first = ask_trackbed(case.request(folder / "data", mine))
    found = verdict(first, second)
    if found == "identical":
        before = stamps(mine), stamps(theirs)
        assert oracle.ask(case.request(folder / "data", mine)) == second
        assert ask_trackbed(case.request(folder / "data", theirs)) == first
        assert (stamps(mine), stamps(theirs)) == before, "a cache was built again"
        assert ask_ranks(case.request(folder / "data", two), 2) == [first, first]
    return found


def run(examples, model, tmp_path, oracle, record_property):
    """Judge that many configurations, and record how many were what."""
    counts = Counter()

    @settings(max_examples=examples, derandomize=not FULL, **_SETTINGS)
    @given(masked_cases(model))
    def check(case):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about ambiguous padding, and what a sample may need
            counts[judge(case, tmp_path / "case", oracle)] += 1

    check()
    record_property(f"conformance of {model}", dict(counts))
    return counts


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_15_configurations_are_identical(model, tmp_path, oracle, record_property):
    assert run(22, model, tmp_path, oracle, record_property)["identical"] >= 15


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "t5"])
def test_100_configurations_are_identical(model, tmp_path, oracle, record_property):
    assert run(150, model, tmp_path, oracle, record_property)["identical"] >= 100


def outcome(function, *arguments, **options):
    """Returns the result of a function, or the text of its AssertionError."""
    try:
        return function(*arguments, **options)
    except AssertionError as error:
        return str(error)


@pytest.mark.parametrize("engine", ["2.1", "1.10", "1.8", "1.7.0", "1.5", None])
@pytest.mark.parametrize("flash", ["0", "1", None])
@pytest.mark.parametrize("fused", ["0", "1", None])
def test_attention_masks_are_those_of_megatron_core(engine, flash, fused, monkeypatch):
    for name, value in (("NVTE_FLASH_ATTN", flash), ("NVTE_FUSED_ATTN", fused)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    random = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 3, (4, length), generator=random) for length in (7, 5)]
    masks = [torch.rand((4, length), generator=random) < 0.5 for length in (7, 5)]
    local = {"use_local": True} if engine is None else {"test_te_version": engine}
    wanted, found = (
        outcome(one.config_attention_mask, *tokens, *masks, **local) for one in (MegatronT5, T5MaskedWordPieceDataset)
    )
    if isinstance(wanted, str):
        assert found == wanted
        return
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, tuple):
            assert all(map(torch.equal, one, other))
        else:
            assert one is other is None or torch.equal(one, other)
