"""A pair made again under its old name is built for anew, even where sizes and both ends of its index agree."""

import itertools
import json
import os
import pickle

import numpy as np
import pytest

from tests.support.files.blends import build, gpt_config, tokens_of, write_pair, write_pairs
from tests.support.files.tidy import remove_folder
from tests.support.tiers import slow_but
from trackbed.cache import await_flush, take_inventory
from trackbed.comm import run_ranks
from trackbed.errors import ArgumentError, CacheError, FormatError
from trackbed.loading import BatchStream, MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from trackbed.tokens import IndexedDataset

ORDERS = ["megatron", "balanced", "instant"]
SHAPES = ["alone", "blend", "group"]
DOCUMENTS = 1600
FIRST, LAST = 1030, DOCUMENTS  # the documents whose lengths lie outside both ends of the index
SIZES = (60, None, None)


def lengths_of(seed):
    return np.random.default_rng(seed).integers(1, 12, DOCUMENTS)


def changed(lengths, kind, rng):
    """Other lengths of the same sum, whose ends are the same."""
    found = lengths.copy()
    while (found == lengths).all():
        here, there = rng.integers(FIRST, LAST, 2)
        if kind == "permuted":
            rng.shuffle(found[FIRST:LAST])
        elif kind == "swapped":
            found[[here, there]] = found[[there, here]]
        elif kind == "moved":
            found = np.insert(np.delete(found, here), there, found[here])
        else:
            step = min(int(found[here]) - 1, 3)
            found[here] -= step
            found[there] += step
    return found


def config_of(folder, cache, *, order, shape):
    pair, other = str(folder / "pair"), str(folder / "other")
    blend = {"alone": ([pair], None), "blend": ([pair, other], [2.0, 1.0]), "group": (["both"], None)}[shape]
    groups = {"both": [pair, other]} if shape == "group" else None
    return gpt_config(folder / cache, blend=blend, split="1", order=order, groups=groups)


def content(dataset):
    return tokens_of(dataset, range(len(dataset)))


def samplers_of(train):
    yield MegatronPretrainingSampler(len(train), 0, 4, 0, 1, fingerprint=train.fingerprint)
    yield MegatronPretrainingRandomSampler(train, len(train), 0, 4, 0, 1, data_sharding=False)
    yield BatchStream(train, MegatronPretrainingSampler(len(train), 0, 4, 0, 1))


def refuse(sampler, state):
    """A position is refused by the tokens that it knows, or by the checksum of the lengths alone."""
    with pytest.raises(ArgumentError, match=r"data_checksum was|found others: tokens: "):
        sampler.load_state_dict(state)
    lengths_alone = {name: value for name, value in state.items() if name != "content"}
    with pytest.raises(ArgumentError, match=r"data_checksum was '[0-9a-f]+', found '[0-9a-f]+'"):
        sampler.load_state_dict(lengths_alone)


def check_made_again(folder, *, order, shape, kind, seed):
    remove_folder(folder)
    folder.mkdir()
    lengths = lengths_of(seed)
    write_pair(folder / "pair", lengths)
    write_pair(folder / "other", lengths_of(99))
    config = config_of(folder, "cache", order=order, shape=shape)
    before = build(config, SIZES)[0]
    old, states = content(before), [one.state_dict() for one in samplers_of(before)]
    identity = IndexedDataset(str(folder / "pair")).identity

    write_pair(folder / "pair", changed(lengths, kind, np.random.default_rng(seed)))
    assert IndexedDataset(str(folder / "pair")).identity == identity
    again = build(config, SIZES)[0]
    fresh = build(config_of(folder, "fresh", order=order, shape=shape), SIZES)[0]
    assert content(again) == content(fresh)
    assert order == "instant" or content(again) != old
    for one, state in zip(samplers_of(again), states, strict=True):
        refuse(one, state)
        one.load_state_dict(one.state_dict())
    assert content(build(config, SIZES)[0]) == content(fresh)


KINDS = ["permuted", "swapped", "moved", "given"]


@pytest.mark.parametrize(
    ("order", "shape", "kind"),
    slow_but(
        [(ORDERS[at], SHAPES[(at + number) % 3], kind) for at in range(3) for number, kind in enumerate(KINDS)],
        itertools.product(ORDERS, SHAPES, KINDS),
    ),
)
def test_a_pair_made_again_is_built_for_anew_and_old_positions_are_refused(tmp_path, order, shape, kind):
    check_made_again(tmp_path / "case", order=order, shape=shape, kind=kind, seed=3)


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_pair_rewritten_in_place_whose_times_were_put_back_is_built_for_anew(tmp_path, order, is_remembered):
    """As an archive with fixed times does, unpacked over the old pair: inode, size and time are the same."""
    lengths = lengths_of(5)
    write_pair(tmp_path / "pair", lengths)
    write_pair(tmp_path / "again", changed(lengths, "permuted", np.random.default_rng(5)))
    config = config_of(tmp_path, "cache", order=order, shape="alone")
    for _ in range(1 + is_remembered):
        state = next(samplers_of(build(config, SIZES)[0])).state_dict()
    for ending in ("bin", "idx"):
        path = tmp_path / f"pair.{ending}"
        before = path.stat()
        path.write_bytes((tmp_path / f"again.{ending}").read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        found = path.stat()
        assert (found.st_ino, found.st_size, found.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    again = build(config, SIZES)[0]
    assert content(again) == content(build(config_of(tmp_path, "fresh", order=order, shape="alone"), SIZES)[0])
    refuse(next(samplers_of(again)), state)


@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_in_another_process_does_not_read_a_pair_made_again_meanwhile(tmp_path, order):
    lengths = lengths_of(6)
    write_pair(tmp_path / "pair", lengths)
    train = build(config_of(tmp_path, "cache", order=order, shape="alone"), SIZES)[0]
    sent = pickle.dumps(train)
    assert content(pickle.loads(sent)) == content(train)
    write_pair(tmp_path / "pair", lengths, seed=77)
    with pytest.raises(FormatError, match=r"pair\.idx: the file must be the one that was opened, found another one"):
        pickle.loads(sent)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_thousand_pairs_made_again_are_built_for_anew(tmp_path, order):
    for seed in range(334):
        kind = ["permuted", "swapped", "moved", "given"][seed % 4]
        check_made_again(tmp_path / "case", order=order, shape=SHAPES[seed % 3], kind=kind, seed=seed)


def manifests(cache):
    return {path.name: path.stat().st_ino for path in (cache / ".trackbed").glob("*.json")}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pair_with_another_stamp_and_the_same_lengths_keeps_its_indices(tmp_path, shape):
    write_pair(tmp_path / "pair", lengths_of(1))
    write_pair(tmp_path / "other", lengths_of(2))
    config = config_of(tmp_path, "cache", order="megatron", shape=shape)
    state = next(samplers_of(build(config, SIZES)[0])).state_dict()
    before = manifests(tmp_path / "cache")
    os.utime(tmp_path / "pair.idx", ns=(1, 1))
    again = build(config, SIZES)[0]
    assert manifests(tmp_path / "cache") == before
    next(samplers_of(again)).load_state_dict(state)


def test_the_checksum_is_computed_once_for_each_stamp(tmp_path, monkeypatch):
    write_pair(tmp_path / "pair", lengths_of(1))
    config = config_of(tmp_path, "cache", order="megatron", shape="alone")
    build(config, SIZES)
    os.utime(tmp_path / "pair.idx", ns=(1, 1))
    build(config, SIZES)
    monkeypatch.setattr("trackbed.datasets.gpt.indices.checksum_lengths", None)
    build(config, SIZES)
    os.utime(tmp_path / "pair.idx", ns=(2, 2))
    with pytest.raises(TypeError):
        build(config, SIZES)


def test_one_rank_computes_the_checksum_and_the_others_believe_it(tmp_path):
    write_pair(tmp_path / "pair", lengths_of(1))
    config = config_of(tmp_path, "cache", order="megatron", shape="alone")
    run_ranks(2, lambda group: build_on(group, config))
    write_pair(tmp_path / "pair", changed(lengths_of(1), "permuted", np.random.default_rng(0)))
    fresh = content(build(config_of(tmp_path, "fresh", order="megatron", shape="alone"), SIZES)[0])
    assert run_ranks(2, lambda group: build_on(group, config)) == [fresh, fresh]


def build_on(group, config):
    from trackbed.builder import BlendedMegatronDatasetBuilder
    from trackbed.datasets import GPTDataset

    return content(BlendedMegatronDatasetBuilder(GPTDataset, SIZES, lambda: True, config, group=group).build()[0])


def make_older(cache):
    """Make manifests what commits before a67b0ce wrote: without boot and data."""
    for path in (cache / ".trackbed").glob("*.json"):
        fields = json.loads(path.read_text())
        del fields["boot"], fields["data"]
        path.write_text(json.dumps(fields))


@pytest.mark.parametrize("is_blend", [False, True])
def test_an_entry_of_an_older_version_is_built_again_in_place(tmp_path, is_blend):
    prefixes = write_pairs(tmp_path)
    blend = (prefixes, [3, 2, 1]) if is_blend else (prefixes[:1], None)
    config = gpt_config(tmp_path / "cache", blend=blend, split="8,1,1")
    wanted = [content(one) for one in build(config)]
    make_older(tmp_path / "cache")
    with pytest.raises(CacheError, match=r"must be a JSON object with the fields of docs/formats/cache.md: 'boot'"):
        build(gpt_config(tmp_path / "cache", blend=blend, split="8,1,1", defer_npy_index_mmap=True))[0][0]
    assert [content(one) for one in build(config)] == wanted
    entries = take_inventory(str(tmp_path / "cache")).entries
    assert not any(entry.is_aside for entry in entries)
    assert all(entry.record.data is not None for entry in entries if entry.class_name == "GPTDataset")


def test_a_position_without_a_checksum_is_refused_if_it_names_a_dataset(tmp_path, caplog):
    train = build(gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), [3, 2, 1]), split="8,1,1"))[0]
    *told, loader = samplers_of(train)
    for one in told:
        state = one.state_dict()
        del state["data_checksum"]
        with pytest.raises(ArgumentError, match=r"must have a data_checksum, found none.* consumed_samples=0"):
            one.load_state_dict(state)
    untold = MegatronPretrainingSampler(len(train), 4, 4, 0, 1)
    loader.load_state_dict(untold.state_dict())
    assert "without data_checksum" in caplog.text
    assert loader.state_dict()["consumed_samples"] == 4


def test_positions_are_plain_values_without_waiting_for_each_batch(tmp_path):
    train = build(gpt_config(tmp_path / "cache", blend=(write_pairs(tmp_path), [3, 2, 1]), split="8,1,1"))[0]
    for one in samplers_of(train):
        assert json.loads(json.dumps(one.state_dict())) == one.state_dict()
        assert {type(value) for value in one.state_dict().values()} <= {str, int, type(None)}


def test_an_index_that_cannot_be_built_again_leaves_the_old_one_in_place(tmp_path):
    """A folder that cannot be written to: the error names the cause, and nothing was removed."""
    write_pair(tmp_path / "pair", lengths_of(1))
    config = config_of(tmp_path, "cache", order="megatron", shape="alone")
    build(config, SIZES)
    await_flush()
    write_pair(tmp_path / "pair", changed(lengths_of(1), "permuted", np.random.default_rng(0)))
    before = sorted(tmp_path.joinpath("cache").rglob("*"))
    remove_folder(tmp_path / "cache" / ".trackbed" / "partial")
    (tmp_path / "cache" / ".trackbed" / "partial").write_text("in the way")
    with pytest.raises(CacheError, match="partial"):
        build(config, SIZES)
    assert sorted(tmp_path.joinpath("cache").rglob("*")) == before
