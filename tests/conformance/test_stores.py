"""Samples of pairs in object stores against those of the same pairs on a disk, for generated configurations."""

import copy
import json
import os
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.files.stored_pairs import upload
from tests.support.files.tidy import remove_folder
from tests.support.megatron_core.cases import Case, cases
from tests.support.megatron_core.oracle import ask_ranks, ask_trackbed, build_with_trackbed
from trackbed.errors import ArgumentError, TrackbedError
from trackbed.files.stores import parse_address
from trackbed.loading import BatchStream

FULL = os.environ.get("TRACKBED_TIER") == "full"
EXAMPLES, FEW = (50, 12) if FULL else (12, 5)


@dataclass(frozen=True)
class Plan:
    """What is done with a case."""

    case: Case
    order: str
    is_grouped: bool
    ranks: int
    workers: int


PLANS = st.builds(
    Plan,
    case=cases(),
    order=st.sampled_from(["megatron", "balanced", "instant"]),
    is_grouped=st.booleans(),
    ranks=st.sampled_from([1, 1, 2]),
    workers=st.sampled_from([0, 0, 0, 2]),
)


def request_of(plan, folder, root, cache):
    """The request of a plan, with pairs below `root`, which is a folder or an address."""
    request = copy.deepcopy(plan.case.request(folder, cache))
    config = request["config"]
    config["order"] = plan.order
    config.setdefault("order", plan.order)
    if plan.order == "instant":
        config["drop_last_partial_validation_sequence"] = True
    for name in ("blend", "blend_per_split"):
        if name in config:
            config[name] = _moved(config[name], str(folder), root)
    if plan.is_grouped:
        prefixes = [f"{root}/{number}" for number in range(len(plan.case.data))]
        dtypes = {one.dtype for one in plan.case.data}
        if len(dtypes) == 1:
            config["groups"] = {prefixes[0]: prefixes}
    if "://" in root:
        config["mmap_bin_files"] = False
        config["object_storage_cache_path"] = f"{cache}-idx"
    return request


def _moved(value, folder, root):
    if isinstance(value, str):
        return value.replace(folder, root, 1)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(one, folder, root) for one in value)
    return value


def samples_of(answer):
    """The digests of all samples of an answer, or its error."""
    if not isinstance(answer, dict):
        return [samples_of(one) for one in answer] if isinstance(answer, list) else answer
    if "error" in answer:
        return "error"
    if "datasets" in answer:
        return samples_of(answer["datasets"])
    return {"samples": answer["samples"], "members": samples_of(answer.get("members", []))}


def batches_of(dataset, workers) -> list[dict[str, Any]]:
    """Batches of a dataset: gathered, or stacked by worker processes."""
    size = min(len(dataset), 40)
    indices = [list(range(at, min(at + 16, size))) for at in range(0, size, 16)]
    if workers:
        made = torch.utils.data.DataLoader(dataset, batch_sampler=indices, num_workers=workers)
    else:
        made = BatchStream(dataset, indices)
    return [{name: tensor.clone() for name, tensor in batch.items()} for batch in made]


def compare(plan, folder, root):
    """Compares the samples; returns how many batches were equal, or None if the disk refuses the configuration."""
    ours, theirs = (request_of(plan, folder, one, folder / f"cache{at}") for at, one in enumerate((str(folder), root)))
    if plan.ranks == 1:
        wanted, found = ask_trackbed(ours), ask_trackbed(theirs)
    else:
        wanted, found = ask_ranks(ours, plan.ranks), ask_ranks(theirs, plan.ranks)
    assert samples_of(found) == samples_of(wanted), found
    if "error" in (wanted if plan.ranks == 1 else wanted[0]):
        return None
    count = 0
    for local, stored in zip(build_with_trackbed(ours), build_with_trackbed(theirs), strict=True):
        if local is None or isinstance(local, list) or not len(local):
            continue
        for batch, other in zip(batches_of(local, 0), batches_of(stored, plan.workers), strict=True):
            assert batch.keys() == other.keys()
            assert all(torch.equal(tensor, other[name]) for name, tensor in batch.items())
            count += 1
    return count


def run(examples, folder, store, record_property):
    counts = []

    @settings(
        max_examples=examples,
        derandomize=not FULL,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        print_blob=False,
    )
    @given(PLANS)
    def check(plan):
        remove_folder(folder)
        plan.case.write(folder)
        root = store(folder, len(plan.case.data))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about ambiguous padding
            try:
                counts.append(compare(plan, folder, root))
            except (ArgumentError, TrackbedError):
                build_with_trackbed(request_of(plan, folder, str(folder), folder / "again"))
                raise

    check()
    identical = sum(count is not None for count in counts)
    record_property("conformance of stores", {"identical": identical, "refused": len(counts) - identical})
    assert identical >= examples // 2
    assert sum(filter(None, counts)) >= examples


def uploads(bucket, root_of):
    """Returns a function that copies the pairs of a case into a bucket, and returns their folder's address."""
    serial = iter(range(10**9))

    def store(folder, num_pairs):
        key = f"case{next(serial)}"
        for number in range(num_pairs):
            upload(bucket, folder / str(number), f"{key}/{number}")
        return root_of(key)

    return store


def test_samples_from_a_bucket_are_those_of_the_disk(tmp_path, bucket, record_property):
    run(EXAMPLES, tmp_path / "case", uploads(bucket, bucket.text), record_property)


@pytest.mark.slow
def test_samples_from_radosgw_are_those_of_the_disk(tmp_path, ceph_bucket, record_property):
    run(50, tmp_path / "case", uploads(ceph_bucket, ceph_bucket.text), record_property)


def test_samples_from_a_web_server_are_those_of_the_disk(tmp_path, web_server, record_property):
    pytest.importorskip("obstore")
    run(FEW, tmp_path / "case", lambda folder, _: f"{web_server}/{folder.relative_to(tmp_path)}", record_property)


def test_samples_at_addresses_of_files_are_those_of_the_disk(tmp_path, record_property):
    pytest.importorskip("obstore")
    run(FEW, tmp_path / "case", lambda folder, _: parse_address(f"file://{folder}").text, record_property)


def test_samples_through_multi_storage_client_are_those_of_the_disk(tmp_path, monkeypatch, record_property):
    pytest.importorskip("multistorageclient")
    profile = {"storage_provider": {"type": "file", "options": {"base_path": str(tmp_path)}}}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"disk": profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    run(FEW, tmp_path / "case", lambda folder, _: f"msc://disk/{folder.relative_to(tmp_path)}", record_property)
