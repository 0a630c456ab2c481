"""Caches and positions that commit a67b0ce has written are read, and nothing is built again (golden/PROVENANCE.md)."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from trackbed.errors import ArgumentError

GOLDEN = Path(__file__).parent / "golden"
SAVED = json.loads((GOLDEN / "a67b0ce" / "positions.json").read_text())
CASES = [tuple(case.split()) for case in SAVED]


def load_writer():
    spec = importlib.util.spec_from_file_location("golden_writer", GOLDEN / "write.py")
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    return writer


writer = load_writer()


def files_below(folder):
    """Content of all files but notes and records of use, which a start leaves."""
    left_out = ("notes", "uses", "partial")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not set(path.parts) & set(left_out)
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(GOLDEN / "a67b0ce", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("order", "name"), [case for case in CASES if case[0] != "instant"])
def test_a_cache_is_opened_and_nothing_is_built(folder, order, name):
    before = files_below(folder / "cache")
    dataset = writer.dataset_of(order, name, defer_npy_index_mmap=True)
    assert [dataset[position]["tokens"].tolist() for position in (6, 7)] == SAVED[f"{order} {name}"]["tokens"]
    assert files_below(folder / "cache") == before


@pytest.mark.parametrize("kind", ["sequential", "random"])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("order", "name"), CASES)
def test_a_run_resumes_from_a_position(folder, order, name, moved, kind):
    options = {}
    if moved:
        for path in folder.glob("pair*"):
            (folder / "elsewhere").mkdir(exist_ok=True)
            path.rename(folder / "elsewhere" / path.name)
        prefixes, weights = writer.BLENDS[name]
        options["blend"] = ([f"elsewhere/{prefix}" for prefix in prefixes], weights)
    dataset = writer.dataset_of(order, name, **options)
    sampler = writer.samplers_of(dataset)[kind]
    saved = SAVED[f"{order} {name}"]["states"][kind]
    sampler.load_state_dict(saved)
    state = sampler.state_dict()
    assert {**state, "content": None} == {**saved, "content": None, "fingerprint": str(dataset.fingerprint)}
    assert (dataset.fingerprint == saved["fingerprint"]) is not moved
    if kind == "sequential":
        assert [dataset[k]["tokens"].tolist() for k in next(iter(sampler))] == SAVED[f"{order} {name}"]["tokens"]


@pytest.mark.parametrize(("order", "name"), CASES)
def test_a_position_of_other_samples_is_refused(folder, order, name):
    sampler = writer.samplers_of(writer.dataset_of(order, name, random_seed=8))["sequential"]
    with pytest.raises(ArgumentError, match=r"found others: .*random_seed: 7, now 8"):
        sampler.load_state_dict(SAVED[f"{order} {name}"]["states"]["sequential"])
