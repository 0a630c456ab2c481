"""Generated configurations of the builder, and what came of them in a form that can be compared."""

import json
from dataclasses import replace

from hypothesis import strategies as st

from tests.support.megatron_core.cases import VOCAB, cases
from tests.support.megatron_core.observe import describe
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer


def configurations(orders=("megatron", "megatron", "balanced")):
    """Pairs and arguments: those that are compared with Megatron Core, in these orders."""
    ordered = st.tuples(cases(), st.sampled_from(orders))
    return ordered.map(lambda two: replace(two[0], tokenizer="null", options={**two[0].options, "order": two[1]}))


def builder_of(case, folder, cache, *, wants=True, group=None):
    """The builder of a generated configuration, whose pairs lie in `folder`."""
    request = case.request(folder, cache)
    given = dict(request["config"])
    if given.get("blend"):
        given["blend"] = tuple(given["blend"])
    if given.get("blend_per_split"):
        given["blend_per_split"] = [blend and tuple(blend) for blend in given["blend_per_split"]]
    config = GPTDatasetConfig(tokenizer=NullTokenizer(VOCAB), **given)
    return BlendedMegatronDatasetBuilder(GPTDataset, list(request["sizes"]), lambda: wants, config, group=group)


def built(builder):
    """What every dataset holds, or what building it raised."""
    try:
        return [describe(dataset) for dataset in builder.build()]
    except Exception as error:  # whatever it is, it is compared
        return error


def files_in(folder):
    """Bytes of each file of a cache, by name, but for times of files: notes, memos, and the data's in manifests."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "notes"]
    return {str(path.relative_to(folder)): _without_stamps(path) for path in files}


def _without_stamps(path):
    if path.suffix != ".json":
        return path.read_bytes()
    manifest = json.loads(path.read_bytes())
    if manifest["data"] is not None:
        manifest["data"] = manifest["data"]["crc32"]
    return manifest
