"""Splits with fewer tokens than one sample, in the order "instant": one sample, which repeats them until it is full."""

from itertools import cycle, islice

import numpy as np
import pytest

from tests.support.files.blends import EOD, build, gpt_config, tokens_of, write_pair
from trackbed.blends import measure_blend, plan_blend, read_blend_file
from trackbed.errors import PlanError
from trackbed.loading import provenance
from trackbed.tokens import IndexedDataset

S = 16
CASES = [[1], [3, 4], [0, 3, 0, 4, 0], [15], [16], [7, 8], [1] * 13, [0] * 40 + [2] + [0] * 40]


def tokens_in(prefix):
    pair = IndexedDataset(prefix)
    return np.concatenate([pair.get(document) for document in range(len(pair))]).tolist()


def dataset_of(prefix, samples, **options):
    options = {"create_cu_seqlens": True, "order": "instant", "split": "1", **options}
    return build(gpt_config(None, blend=([prefix], None), **options), [samples, 0, 0])[0]


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("lengths", CASES, ids=str)
def test_the_tokens_are_repeated_until_the_sample_is_full(tmp_path, lengths, extra):
    prefix = write_pair(tmp_path / "pair", lengths)
    total = sum(lengths)
    if total >= S + extra:
        pytest.skip("a whole sample")
    dataset = dataset_of(prefix, 5, add_extra_token_to_sequence=extra)
    assert len(dataset) == 5
    assert dataset.samples_per_epoch == 1
    text = list(islice(cycle(tokens_in(prefix)), S + extra))
    for position in range(-5, 5):
        found = dataset[position]
        assert found["tokens"].tolist() == text[:S]
        assert found["labels"].tolist()[: S - 1] == text[1:S]
        assert not extra or found["labels"].tolist() == text[1:]
    batch = dataset.gather(range(5))
    for at, position in enumerate(range(5)):
        for name, value in dataset[position].items():
            assert np.asarray(batch[name][at]).tolist() == np.asarray(value).tolist(), name


def test_each_repeat_is_made_of_documents_of_its_own(tmp_path):
    prefix = write_pair(tmp_path / "pair", [3, 4])
    options = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    dataset = dataset_of(prefix, 2, **options)
    found = dataset[0]
    assert found["cu_seqlens"].tolist()[:6] == [0, 3, 7, 10, 14, 16]
    assert found["max_seqlen"].item() == 4
    assert found["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3] * 2 + [0, 1]
    assert [int(token) == EOD for token in found["tokens"]] == [number % 7 in (2, 6) for number in range(S)]
    origins = [(one.document, one.start, one.stop) for one in provenance(dataset, 1).origins]
    assert origins == [(0, 0, 3), (1, 0, 4)] * 2 + [(0, 0, 3)]


@pytest.mark.parametrize("split", ["98,1,1", "90,5,5"])
def test_a_blend_of_many_small_datasets_can_be_split(tmp_path, split):
    rng = np.random.default_rng(0)
    prefixes = [write_pair(tmp_path / f"pair{number}", rng.integers(1, 6, 100), seed=number) for number in range(20)]
    config = gpt_config(None, blend=(prefixes, [1.0] * 20), split=split, order="instant")
    for dataset in build(config, [200, 40, 40]):
        positions = range(len(dataset))
        assert tokens_of(dataset, positions) == dataset.gather(positions)["tokens"].tolist()
    members = build(config, [200, 40, 40])[1].datasets
    assert any(member._samples.repeats for member in members)


def test_a_small_group_repeats_all_its_pairs(tmp_path):
    pairs = [write_pair(tmp_path / f"pair{number}", [2, 1], seed=number) for number in range(3)]
    config = gpt_config(None, blend=(["all"], None), split="1", order="instant", groups={"all": pairs})
    dataset = build(config, [4, 0, 0])[0]
    text = list(islice(cycle([token for pair in pairs for token in tokens_in(pair)]), S))
    assert dataset[3]["tokens"].tolist() == text == dataset.gather([3])["tokens"][0].tolist()


def test_a_split_that_has_one_sample_exactly_is_as_it_was(tmp_path):
    prefix = write_pair(tmp_path / "pair", [10, 7])
    dataset = dataset_of(prefix, 3)
    assert not dataset._samples.repeats
    assert dataset[2]["tokens"].tolist() == tokens_in(prefix)[:S]


def test_the_dry_run_and_max_epochs_count_one_sample_an_epoch(tmp_path):
    write_pair(tmp_path / "small", [3, 4])
    write_pair(tmp_path / "large", [400] * 10)
    text = f"""
        version = 1
        sequence_length = {S}
        order = "instant"
        split = "1"
        size = {{train = 12}}
        [[dataset]]
        name = "small"
        path = "small"
        weight = 0.5
        max_epochs = LIMIT
        [[dataset]]
        name = "large"
        path = "large"
        weight = 0.5
    """
    for limit in (6, 5):
        path = tmp_path / f"blend{limit}.toml"
        path.write_text(text.replace("LIMIT", str(limit)))
        plan = plan_blend(measure_blend(read_blend_file(path)))
        small = next(one for one in plan.splits[0].datasets if one.name.endswith("small"))
        assert (small.samples, small.epochs) == (6, 6.0)
        assert (small.shortfall is not None) == (limit == 5)
    options = {"blend": ([str(tmp_path / "small"), str(tmp_path / "large")], [1, 1]), "split": "1", "order": "instant"}
    build(gpt_config(None, **options, blend_max_epochs=[6, None]), [12, 0, 0])
    with pytest.raises(PlanError):
        build(gpt_config(None, **options, blend_max_epochs=[5, None]), [12, 0, 0])
