import shutil
from pathlib import Path

import pytest

from blends import VOCAB, gpt_config, write_pair, write_pairs
from trackbed.build import BlendedMegatronDatasetBuilder, measure_blend, read_blend_file
from trackbed.build.blend_file.weights import Wanted, plan_weights
from trackbed.datasets import NullTokenizer
from trackbed.errors import BlendFileError, PlanError
from trackbed.tokens import IndexedDataset

TOP = "version = 1\nsequence_length = 16\nseed = 7\n"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """pair0, pair1 and pair2 in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path)
    return tmp_path


def measured(text, path="blend.toml"):
    Path(path).write_text(TOP + text)
    return measure_blend(read_blend_file(path))


def test_the_configuration_is_the_one_that_is_written_by_hand(data):
    text = (
        "cache = 'cache'\nsplit = '8,1,1'\nsize = {train = 60, valid = 6, test = 6}\n[[dataset]]\npath = 'pair0'\n"
        "weight = 0.3\n[[dataset]]\npath = 'pair1.bin'\nweight = 2\n[options]\nreset_position_ids = true"
    )
    blend = measured(text)
    ours = blend.config(tokenizer=NullTokenizer(VOCAB))
    theirs = gpt_config("cache", blend=(["pair0", "pair1"], [0.3, 2.0]), split="8,1,1", reset_position_ids=True)
    assert {**vars(ours), "tokenizer": None} == {**vars(theirs), "tokenizer": None}
    assert blend.sizes == (60, 6, 6)
    made = [
        BlendedMegatronDatasetBuilder(blend.dataset_class, blend.sizes, lambda: True, config).build()
        for config in (ours, theirs)
    ]
    for one, other in zip(*made, strict=True):
        assert one.unique_description == other.unique_description
        assert one.fingerprint == other.fingerprint


def test_a_glob_shares_its_weight_out_and_a_group_is_one(data):
    tokens = [sum(IndexedDataset(f"pair{number}").sequence_lengths.tolist()) for number in range(3)]
    rest = "size.train = 10\nsplit = '1'\n[[dataset]]\nname = 'g'\ngroup = ['pair1', 'pair2']\nweight = 3\n"
    by_tokens = measured(f"{rest}[[dataset]]\nglob = 'pair[02].idx'\nweight = 2")
    assert by_tokens.weights[0] == (
        3.0,
        2 * tokens[0] / (tokens[0] + tokens[2]),
        2 * tokens[2] / (tokens[0] + tokens[2]),
    )
    assert [member.name for member in by_tokens.members] == ["g", "pair0", "pair2"]
    assert by_tokens.members[0].tokens == tokens[1] + tokens[2]
    equally = measured(f"{rest}[[dataset]]\nglob = 'pair[02]'\nweight = 2\ndivide = 'equally'")
    assert equally.weights[0] == (3.0, 1.0, 1.0)
    config = equally.config(tokenizer=NullTokenizer(VOCAB))
    assert config.groups == {"g": ["pair1", "pair2"]}
    assert config.path_to_cache is None


def test_everything_that_is_missing_or_damaged_is_named_with_its_line(data):
    (data / "pair2.idx").write_bytes(b"x" * 50)
    (data / "pair1.bin").unlink()
    text = (
        "split = '1'\nsize.train = 5\n[[dataset]]\npath = 'nowhere'\nweight = 1\n[[dataset]]\nglob = 'pair*'\n"
        "weight = 1\n[[dataset]]\ngroup = ['pair0', 'none*']\nweight = 1\n"
    )
    with pytest.raises(BlendFileError) as caught:
        measured(text)
    both = "a .bin and an .idx file must exist, missing"
    assert list(caught.value.problems) == [
        f"blend.toml:7: dataset.path names nowhere: {both} nowhere.idx and nowhere.bin",
        f"blend.toml:10: dataset.glob names pair1: {both} pair1.bin",
        "blend.toml:10: dataset.glob names pair2.idx: the magic must be b'MMIDIDX\\x00\\x00', found b'xxxxxxxxx'",
        "blend.toml:13: dataset.group must match an .idx file at least, found none for none*",
    ]


def test_pairs_of_different_types_are_no_group(data):
    write_pair(data / "wide", [5], dtype="int32")
    with pytest.raises(
        BlendFileError, match=r"blend.toml:6: dataset.group names g: .* found uint16 in pair0 and int32"
    ):
        measured("split = '1'\n[[dataset]]\ngroup = ['pair0', 'wide']\nname = 'g'")


def test_fields_that_contradict_each_other_are_told_with_the_options_line(data):
    text = "split = '1'\nsize.train = 5\n[[dataset]]\npath = 'pair0'\nweight = 1\n[options]\nshuffle_block = 4\n"
    with pytest.raises(BlendFileError, match=r"blend.toml:10: options.shuffle_block .*needs order='instant'"):
        measured(text)
    with pytest.raises(BlendFileError, match=r"blend.toml:1: tokenizer must be given to build a dataset, found none"):
        measured(text.replace("shuffle_block = 4", "")).config()


def test_a_file_may_be_moved_with_its_data(data):
    text = "split = '1'\ncache = 'c'\nsize.train = 5\n[[dataset]]\npath = 'pair0'\nweight = 1\n"
    here = measured(text)
    shutil.copytree(data, data / "below")
    there = measured(text, "below/blend.toml")
    assert (here.members[0].prefix, there.members[0].prefix) == ("pair0", "below/pair0")
    assert there.config(tokenizer=NullTokenizer(VOCAB)).path_to_cache == "below/c"
    assert here.weights == there.weights


def wanted(measure, amount, tokens, part=1.0):
    return Wanted(measure=measure, amount=amount, tokens=2 * tokens, split_tokens=tokens, part=part)


def test_ratios_are_weights_by_token_and_epochs_come_first():
    ratios = [wanted("ratio", 1, 100), wanted("ratio", 3, 50)]
    assert plan_weights(ratios, size=9, sequence_length=10) == ([200.0, 300.0], 9)
    epochs = [wanted("epochs", 2, 100), wanted("epochs", 0.5, 400)]
    assert plan_weights(epochs, size=None, sequence_length=10) == ([20.0, 20.0], 40)
    assert plan_weights([*epochs, *ratios], size=100, sequence_length=10) == ([20.0, 20.0, 24.0, 36.0], 100)
    assert plan_weights([wanted(None, 1, 7)], size=3, sequence_length=10) == (None, 3)


def test_epochs_that_leave_nothing_to_the_others_are_refused_with_what_is_short():
    datasets = [wanted("epochs", 2, 100), wanted("weight", 1, 100)]
    with pytest.raises(PlanError, match=r"found that they need 20 of 15: short by 6"):
        plan_weights(datasets, size=15, sequence_length=10)
    with pytest.raises(PlanError, match="must have tokens or weights to be drawn by, found 2 with neither"):
        plan_weights([wanted("ratio", 1, 0), wanted("ratio", 1, 0)], size=15, sequence_length=10)
