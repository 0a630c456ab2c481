"""The samples of a document are those that `provenance` says, for every order."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.blends import build, gpt_config, write_pair
from tests.support.tiers import slow_but
from trackbed.errors import ArgumentError
from trackbed.index import BlendStage, InstantOrder, Permutation
from trackbed.kernels import find_position
from trackbed.loading import provenance
from trackbed.loading.occurrences import find_document


def searched(dataset, prefix, document):
    """Positions whose provenance names a document."""
    return [
        position
        for position in range(len(dataset))
        if any(
            (origin.prefix, origin.document) == (prefix, document) and origin.stop > origin.start
            for origin in provenance(dataset, position).origins
        )
    ]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Prefixes of pairs, and their number of documents: some are empty, and one pair has less than a sample."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = random.Random(1)
    lengths = [[draw.choice([0, 1, 5, 16, 17, 40, 90]) for _ in range(count)] for count in (60, 35, 50)]
    lengths.append([3, 0, 4])
    return {write_pair(folder / f"{number}", one): len(one) for number, one in enumerate(lengths)}


@pytest.mark.parametrize("count", slow_but([20], [20, 200]))
@pytest.mark.parametrize("order", ["megatron", "balanced", "instant", "instant in blocks", "packed"])
@pytest.mark.parametrize("kind", ["blend", "group", "one"])
def test_a_document_is_found_where_a_search_finds_it(pairs, tmp_path, order, kind, count):
    prefixes = list(pairs)
    options = {"order": order.split()[0], "split": "8,2,0"}
    if order.endswith("blocks"):
        options |= {"shuffle_block": 4, "shuffle_window": 3}
    if kind == "group":
        options |= {"groups": {"all": prefixes[:3]}, "blend": (["all", prefixes[3]], [3, 1])}
    else:
        options["blend"] = (prefixes[:3], [3, 1, 2]) if kind == "blend" else (prefixes[:1], None)
        if kind == "blend" and order == "instant":
            options["blend_stages"] = [(60, [1, 0, 2]), (150, [0, 1, 1], 90)]
    config = gpt_config(tmp_path / "cache", **options)
    train, valid, _ = build(config, (400, 30, 0))
    draw = random.Random(2)
    used = {origin.prefix for dataset in (train, valid) for origin in provenance(dataset, 0).origins}
    places = [
        (prefix, draw.randrange(pairs[prefix]))
        for prefix in draw.choices(prefixes[: 1 if kind == "one" else 3], k=count)
    ]
    for prefix, document in places:
        for dataset in (train, valid):
            assert find_document(dataset, prefix, document).tolist() == searched(dataset, prefix, document)
    assert used <= set(prefixes)


def test_a_split_smaller_than_a_sample_repeats_its_documents(pairs, tmp_path):
    small = list(pairs)[3]
    config = gpt_config(None, blend=([small], None), split="1", order="instant")
    dataset = build(config, (5, 0, 0))[0]
    for document in range(3):
        assert find_document(dataset, small, document).tolist() == searched(dataset, small, document)


def test_other_pairs_and_documents_are_refused(pairs, tmp_path):
    prefix = next(iter(pairs))
    dataset = build(gpt_config(None, blend=([prefix], None), split="1", order="instant"), (5, 0, 0))[0]
    with pytest.raises(ArgumentError, match="gone: must be a pair of the dataset, found none of this prefix"):
        find_document(dataset, "gone", 0)
    with pytest.raises(ArgumentError, match=r"document must be in \[0, 60\), found 60"):
        find_document(dataset, prefix, 60)


@given(st.integers(1, 2**63 - 1) | st.integers(1, 3000), st.integers(0, 2**64 - 1), st.data())
def test_a_position_is_found_by_its_image(size, key, data):
    position = data.draw(st.integers(0, size - 1))
    assert find_position(Permutation(size, seed=key)(position), size=size, key=key) == position


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(0, 2**64 - 1),
    st.integers(1, 300),
    st.sampled_from([1, 3]),
    st.data(),
)
def test_an_order_finds_its_samples(sizes, seed, num_samples, block, data):
    weights = st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes)).filter(any)
    first = BlendStage(0, data.draw(weights))
    stages = [first, *data.draw(st.lists(st.builds(BlendStage, st.just(50), weights, st.integers(0, 99)), max_size=1))]
    order = InstantOrder.staged(
        sizes=sizes, stages=stages, seed=seed, num_samples=num_samples, block=block, window=2, when_exhausted="raise"
    )
    datasets, samples = order.locate(np.arange(num_samples))
    dataset = data.draw(st.integers(0, len(sizes) - 1))
    sample = data.draw(st.integers(0, sizes[dataset] - 1))
    wanted = np.flatnonzero((datasets == dataset) & (samples == sample))
    assert order.find(dataset, sample).tolist() == wanted.tolist()
    with pytest.raises(ArgumentError, match="dataset and sample must be ones of the order"):
        order.find(dataset, sizes[dataset])
