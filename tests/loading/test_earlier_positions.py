"""Positions and caches of earlier versions, in whose fingerprints create_attention_mask was."""

import logging
from pathlib import Path

import pytest

from blends import build, gpt_config, write_pair
from trackbed.datasets import BlendedDataset
from trackbed.errors import ArgumentError
from trackbed.loading import MegatronPretrainingRandomSampler, MegatronPretrainingSampler

FINGERPRINTS = {
    ("megatron", "one", True): "ab12bd2ffa6c9255e50f832632287e1019b520c8cf59f07398312d6d3b44d420",
    ("megatron", "blend", True): "90f2543b6cbea11cd8a311e185d0d85288697d7b71d038416136b3978c861bab",
    ("megatron", "one", False): "6af533e51718f275c1af936b75aa7b9272f740214e427172a6723cc34e6697da",
    ("megatron", "blend", False): "e66b695f0a6d78b1b8c5cca41b836a18dbafe30b3f56194eb0cd6da7e48397e1",
    ("balanced", "one", True): "ab12bd2ffa6c9255e50f832632287e1019b520c8cf59f07398312d6d3b44d420",
    ("balanced", "blend", True): "af483b78c3025b9207a93975471cc73db6ad063ad319a237febd0174af21b44b",
    ("balanced", "one", False): "6af533e51718f275c1af936b75aa7b9272f740214e427172a6723cc34e6697da",
    ("balanced", "blend", False): "05e7a3174e1df6113776fe3006ddaee738c160fddd5f126a078f323c5d8db9ed",
    ("instant", "one", True): "6ebd521de854348a9750628e3521eaa81202c2654ffd21706045c342fec76c68",
    ("instant", "blend", True): "a99760efffe334861083be2ca7f461b2838e34152a3a630798ff22721134dc1e",
    ("instant", "one", False): "2b85b71a82d5bf8679d504881349d44625c88e800afd73f2ea6346a2316fcd91",
    ("instant", "blend", False): "de3859dbd7e43d4e86b5adb66bd198af8ccdd3566651ab636d6d239c3544c652",
}
"""Fingerprints of an earlier version, by order, dataset and create_attention_mask."""
CHECKSUMS = {"one": "787cb424", "blend": "f739e02bcd725e8a8dfe25509b5c01f9"}
BLENDS = {"one": (["pair0"], None), "blend": (["pair0", "pair1"], [0.5, 0.5])}


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        write_pair(Path(f"pair{number}"), [20, 30, 40], seed=number)


def dataset_of(order, name, *, mask, folder="cache", **options):
    cache = None if order == "instant" else Path(folder)
    config = gpt_config(
        cache, **{"blend": BLENDS[name], "split": "1", "order": order, "create_attention_mask": mask, **options}
    )
    return build(config, (8, None, None))[0]


def earlier_state(case, dataset):
    return {
        "version": 1,
        "consumed_samples": 2,
        "total_samples": len(dataset),
        "order": "sequential",
        "fingerprint": FINGERPRINTS[case],
        "samples_per_epoch": None,
        "permuted": None,
        "data_parallel_size": None,
        "data_checksum": CHECKSUMS[case[1]],
    }


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("case", FINGERPRINTS)
def test_a_run_resumes_from_a_position_of_an_earlier_version_with_masks_or_without(pairs, case, mask):
    dataset = dataset_of(*case[:2], mask=mask)
    sampler = MegatronPretrainingSampler(len(dataset), 0, 2, 0, 1, fingerprint=dataset.fingerprint)
    sampler.load_state_dict(earlier_state(case, dataset))
    assert next(iter(sampler)) == [2, 3]
    assert sampler.state_dict()["fingerprint"] == dataset.fingerprint


def test_positions_no_longer_depend_on_masks_but_on_all_else(pairs):
    for name in BLENDS:
        with_masks, without = (dataset_of("megatron", name, mask=mask) for mask in (True, False))
        assert with_masks.fingerprint == without.fingerprint
        other = dataset_of("megatron", name, mask=False, eod_mask_loss=True)
        sampler = MegatronPretrainingSampler(len(other), 0, 2, 0, 1, fingerprint=other.fingerprint)
        for mask in (True, False):
            with pytest.raises(ArgumentError, match="only with the saved fingerprint"):
                sampler.resumed(earlier_state(("megatron", name, mask), other))


def test_the_random_sampler_accepts_them_too(pairs):
    dataset = dataset_of("megatron", "blend", mask=False)
    sampler = MegatronPretrainingRandomSampler(dataset, len(dataset), 0, 2, 0, 1, data_sharding=False)
    state = sampler.state_dict()
    sampler.load_state_dict({**state, "fingerprint": FINGERPRINTS["megatron", "blend", False]})


def test_the_index_of_a_blend_without_masks_of_an_earlier_version_is_found(pairs, monkeypatch, caplog):
    """Such an entry differs from that of a blend with masks in its fingerprint only."""
    decisions = dataset_of("megatron", "blend", mask=True, folder="other")._earlier_decisions()
    with monkeypatch.context() as earlier:
        earlier.setattr(BlendedDataset, "_decisions", decisions)
        dataset_of("megatron", "blend", mask=True)
    with caplog.at_level(logging.WARNING):
        found = dataset_of("megatron", "blend", mask=False)
    assert ".trackbed" not in found.index_paths[0]
    assert caplog.records == []
