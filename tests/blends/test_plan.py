"""The dry run compared with the datasets that the builder makes of the same file."""

import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.files.blends import VOCAB, write_pair, write_pairs
from tests.support.tiers import with_files
from trackbed.blends import measure_blend, plan_blend, read_blend_file
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import BlendedDataset, NullTokenizer
from trackbed.errors import BlendFileError, OversampleError, PlanError
from trackbed.index import Split

TOP = "version = 1\nsequence_length = 16\nseed = 7\ncache = 'cache'\n"


@pytest.fixture
def data(tmp_path):
    """Writes pair0, pair1 and pair2."""
    write_pairs(tmp_path)
    return tmp_path


def measured(folder, text):
    path = folder / "blend.toml"
    path.write_text(TOP + text)
    return measure_blend(read_blend_file(path))


def build(blend):
    """Builds the datasets of the file."""
    config = blend.config(tokenizer=NullTokenizer(VOCAB))
    return BlendedMegatronDatasetBuilder(blend.dataset_class, blend.sizes, lambda: True, config).build()


def draws(dataset):
    """Returns the number of draws from each dataset of a blend."""
    count = len(dataset.datasets)
    if len(dataset) == 0:
        return [0] * count
    if dataset.config.order != "instant":
        return np.bincount(dataset.dataset_index, minlength=count).tolist()
    datasets = dataset.order.locate(range(len(dataset)))[0]
    return np.bincount(datasets, minlength=count).tolist()


def check(plan, built, order):
    """Compares every number of the plan with that of the builder."""
    planned = {one.split: one for one in plan.splits}
    for split, dataset in zip(Split, built, strict=True):
        if dataset is None:
            assert split.name not in planned
            continue
        ours = planned[split.name]
        members = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
        assert [one.prefix for one in ours.datasets] == [member.dataset_path for member in members]
        if isinstance(dataset, BlendedDataset):
            assert ours.samples == len(dataset)
            slack = 2 if order == "megatron" else 0
            assert [one.samples for one in ours.datasets] == pytest.approx(draws(dataset), abs=slack)
        else:
            assert ours.samples in (len(dataset), dataset.num_samples)
        assert sum(one.samples for one in ours.datasets) == ours.samples
        for one, member in zip(ours.datasets, members, strict=True):
            lengths = member.dataset.sequence_lengths[member.indices]
            assert one.tokens == lengths.sum()
            assert one.samples_built == (len(member) if member.num_samples is None else member.num_samples)
            if order != "instant":
                assert one.epochs <= len(member.document_index) / max(1, len(member.indices)) + 1e-9


ENTRIES = """
[[dataset]]
path = "pair0"
weight = 0.5
[[dataset]]
glob = "pair[12]"
weight = 1
"""


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
@pytest.mark.parametrize(
    "text",
    [
        f"split = '8,1,1'\n[size]\ntrain = 300\nvalid = 20\ntest = 1\n{ENTRIES}",
        f"split = '1'\n[size]\ntrain_tokens = 5_000\n{ENTRIES}",
        f"split = '9,1'\noptions.mid_level_dataset_surplus = 0.2\n[size]\ntrain = 77\nvalid = 0\n{ENTRIES}",
        "split = '8,1,1'\n[[dataset]]\ngroup = ['pair*']",
        "split = '8,1,1'\n[size]\ntrain = 40\n[[dataset]]\ngroup = ['pair1', 'pair0']",
        "split = '8,1,1'\n[size]\ntrain = 40\nvalid = 2\n[[dataset]]\nglob = '*'",
        "split = '8,1,1'\n[[dataset]]\nglob = '*'",
        "split = '8,2'\nsize.valid = 3\n[[dataset]]\nepochs = 2.5\npath = 'pair0'\n"
        "[[dataset]]\npath = 'pair2'\nepochs = 0.5",
        "split = '1'\nsize.train = 500\n[[dataset]]\nepochs = 3\npath = 'pair0'\n"
        "[[dataset]]\nratio = 2\npath = 'pair1'\n[[dataset]]\npath = 'pair2'\nratio = 1",
        "[size]\ntrain = 60\nvalid = 5\n[[dataset]]\npath = 'pair0'\nweight = 2\nsplits = ['train', 'valid']\n"
        "[[dataset]]\npath = 'pair1'\nweight = 1\nsplits = ['train']\n[[dataset]]\npath = 'pair2'\nsplits = ['test']",
    ],
)
def test_the_plan_has_the_builders_numbers(data, order, text):
    blend = measured(data, f"order = '{order}'\n{text}")
    plan = plan_blend(blend)
    plan.problems.stop()
    check(plan, build(blend), order)


@with_files
@given(
    st.sampled_from(["megatron", "balanced", "instant"]),
    st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 9)), min_size=2, max_size=5),
    st.tuples(st.integers(1, 400), st.integers(0, 30)),
    st.sampled_from(["1,0", "8,2", "5,5"]),
)
@example("balanced", [(20, 2.0), (20, 3.0), (20, 0.2)], (323, 0), "1,0")  # the last bit of a share decides
@example("balanced", [(20, 10.0), (20, 1.0), (20, 10.0)], (446, 0), "1,0")
def test_the_plan_has_the_builders_numbers_for_any_blend(tmp_path, order, shapes, sizes, split):
    entries = ""
    for number, (documents, weight) in enumerate(shapes):
        write_pair(tmp_path / f"any{number}", [70] * documents, seed=number)
        entries += f"[[dataset]]\npath = 'any{number}'\nweight = {weight}\n"
    (tmp_path / "cache").mkdir(exist_ok=True)
    text = f"order = '{order}'\nsplit = '{split}'\nsize.train = {sizes[0]}\nsize.valid = {sizes[1]}\n{entries}"
    blend = measured(tmp_path, text)
    plan = plan_blend(blend)
    try:
        built = build(blend)
    except PlanError as error:
        if not isinstance(error, OversampleError) or order != "megatron":  # its draws are known to within one
            with pytest.raises(BlendFileError):
                plan.problems.stop()
        return
    plan.problems.stop()
    check(plan, built, order)


@with_files
@given(st.integers(1, 30), st.integers(1, 30))
@example(1, 16)
def test_what_the_builder_builds_is_not_refused_by_a_plan_that_may_be_one_off(tmp_path, train, valid):
    entries = ""
    for number, weight in enumerate((4, 0.0625, 0.0625)):
        write_pair(tmp_path / f"one{number}", [70] * 3, seed=number)
        entries += f"[[dataset]]\npath = 'one{number}'\nweight = {weight}\n"
    (tmp_path / "cache").mkdir(exist_ok=True)
    blend = measured(tmp_path, f"split = '8,2'\nsize.train = {train}\nsize.valid = {valid}\n{entries}")
    try:
        build(blend)
    except OversampleError:
        return
    plan_blend(blend).problems.stop()


def test_stages_are_counted_as_the_order_counts_them(data):
    stages = "[[stage]]\nfrom_token = 1600\nweights = {pair0 = 1}\n"
    stages += "[[stage]]\nfrom_sample = 150\nweights = {'pair[12]' = 1}\n"
    blend = measured(data, f"order = 'instant'\nsplit = '1'\nsize.train = 300\n{stages}{ENTRIES}")
    (train,) = plan_blend(blend).splits
    dataset = build(blend)[0]
    assert [(stage.first_sample, stage.stop_sample) for stage in train.stages] == [
        (0, 100),
        (100, 150),
        (150, train.samples),
    ]
    for stage in train.stages:
        found = dataset.order.locate(range(stage.first_sample, stage.stop_sample))[0]
        assert np.bincount(found, minlength=3).tolist() == list(stage.samples)
    assert train.stages[1].samples == (50, 0, 0)
    # The weight of a glob is divided by tokens, in a stage too.
    tokens = [one.tokens for one in train.datasets]
    share = tokens[1] / (tokens[1] + tokens[2])
    assert train.stages[2].samples[1] == pytest.approx((train.samples - 150) * share, abs=2)


CAPPED = ENTRIES.replace("weight = 0.5", "weight = 0.5\nmax_epochs = {}")


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
@pytest.mark.parametrize("limit", [0.5, 1, 2])
def test_a_dataset_that_falls_short_is_named_with_what_it_lacks(data, order, limit):
    blend = measured(data, f"order = '{order}'\nsplit = '1'\nsize.train = 300\n{CAPPED.format(limit)}")
    plan = plan_blend(blend)
    first = plan.splits[0].datasets[0]
    assert first.samples == 100
    per_epoch = (first.tokens - 1) // 16 if order == "instant" else first.tokens / 16
    most = int(per_epoch * limit + 0.5) if order == "instant" else int(per_epoch * limit)
    with pytest.raises(BlendFileError) as caught:
        plan.problems.stop()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{blend.file.path}:12: dataset.max_epochs of 'pair0', split train, must be at least ")
    assert problem.endswith(
        f"found {limit:g}, which gives {most:,}: short by {100 - most} samples, {(100 - most) * 16:,} tokens"
    )
    if order == "instant":
        with pytest.raises(PlanError, match="runs out"):
            build(blend)


def test_large_numbers_are_written_out(data):
    blend = measured(data, f"split = '1'\nsize.train = 3_000_000_000\n{CAPPED.format(0.5)}")
    with pytest.raises(BlendFileError) as caught:
        plan_blend(blend).problems.stop()
    (problem,) = caught.value.problems
    assert re.search(r"must be at least [\d,]{9,} to give 1,000,000,000 samples, found 0\.5, ", problem)


def test_a_limit_is_kept_to_the_sample(data):
    """One sample more is refused in every order; and the instant order's own limit agrees."""
    blend = measured(data, "order = 'instant'\nsplit = '1'\nsize.train = 300\n" + CAPPED.format(2))
    first = plan_blend(blend).splits[0].datasets[0]
    exact = 100 / ((first.tokens - 1) // 16)
    for limit, falls_short in ((exact, False), (exact * 0.98, True)):
        text = f"order = 'instant'\nsplit = '1'\nsize.train = 300\n{CAPPED.format(limit)}"
        assert (plan_blend(measured(data, text)).splits[0].datasets[0].shortfall is not None) is falls_short
        if not falls_short:
            assert len(build(measured(data, text))[0]) >= 300


def test_where_datasets_run_out_the_others_take_their_place(data):
    text = "order = 'instant'\nsplit = '1'\nsize.train = 300\noptions.blend_when_exhausted = 'reweight'\n"
    blend = measured(data, text + CAPPED.format(1))
    (train,) = plan_blend(blend).splits
    dataset = build(blend)[0]
    assert [one.samples for one in train.datasets] == draws(dataset)
    assert train.stages[1].first_sample == dataset.order.exhaustions[0].sample
    assert train.stages[1].ended == ("pair0",)
    plan_blend(blend).problems.stop()
    every = CAPPED.format(1).replace("weight = 1", "weight = 1\nmax_epochs = 0.1")
    with pytest.raises(BlendFileError, match="dataset of train: at least one dataset must have samples left"):
        plan_blend(measured(data, text + every)).problems.stop()


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_a_dataset_without_tokens_is_named(data, order):
    write_pair(data / "empty", [0])
    text = f"order = '{order}'\nsplit = '1'\nsize.train = 30\n{ENTRIES}[[dataset]]\npath = 'empty'\nweight = 1\n"
    blend = measured(data, text)
    with pytest.raises(
        BlendFileError, match="dataset of 'empty', split train, must have tokens for 13 samples of 16, found 0"
    ):
        plan_blend(blend).problems.stop()
    with pytest.raises(PlanError, match="empty"):
        build(blend)
