import pickle
import re
import shutil
from pathlib import Path

import pytest

from tests.support.files.blends import VOCAB, gpt_config, write_pair, write_pairs
from trackbed.blends import dataset_tables, measure_blend, members, plan_blend, read_blend_file, with_tokenizer
from trackbed.blends.sizes import DatasetRequest, plan_weights
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import NullTokenizer
from trackbed.errors import ArgumentError, BlendFileError, PlanError
from trackbed.tokens import IndexedDataset
from trackbed.tokens.shard_list import shard_list_text

TOP = "version = 1\nsequence_length = 16\nseed = 7\n"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Writes pair0, pair1 and pair2 to the working directory."""
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
    named = {"reset_position_ids": True, "create_attention_mask": False}
    theirs = gpt_config("cache", blend=(["pair0", "pair1"], [0.3, 2.0]), split="8,1,1", **named)
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
    rest += "[[dataset]]\nrepeated = true\n"
    by_tokens = measured(f"{rest}glob = 'pair[02].idx'\nweight = 2")
    assert by_tokens.weights[0] == (
        3.0,
        2 * tokens[0] / (tokens[0] + tokens[2]),
        2 * tokens[2] / (tokens[0] + tokens[2]),
    )
    assert [member.name for member in by_tokens.members] == ["g", "pair0", "pair2"]
    assert by_tokens.members[0].tokens == tokens[1] + tokens[2]
    equally = measured(f"{rest}glob = 'pair[02]'\nweight = 2\ndivide = 'equally'")
    assert equally.weights[0] == (3.0, 1.0, 1.0)
    config = equally.config(tokenizer=NullTokenizer(VOCAB))
    assert config.groups == {"g": ["pair1", "pair2"]}
    assert config.path_to_cache is None


def test_a_list_of_shards_stands_for_the_group_that_it_lists(data):
    (data / "lists").mkdir()
    (data / "lists" / "c.toml").write_text(shard_list_text({"text": ["../pair1", "../pair[2]"]}))
    (data / "pair2.idx").rename("pair[2].idx")
    (data / "pair2.bin").rename("pair[2].bin")
    rest = "size.train = 10\nsplit = '1'\n[[dataset]]\nweight = 1\n"
    listed = measured(f"{rest}group = 'lists/c.toml'").members[0]
    assert (listed.name, listed.pairs) == ("c", ("lists/../pair1", "lists/../pair[2]"))
    by_hand = measured(f"{rest}name = 'c'\ngroup = ['lists/../pair1', 'lists/../pair[[]2]']").members[0]
    assert (listed.prefix, listed.pairs, listed.tokens) == (by_hand.prefix, by_hand.pairs, by_hand.tokens)


def test_a_list_of_several_keys_needs_one(data):
    (data / "c.toml").write_text(shard_list_text({"text": ["pair0", "pair1"], "a title": ["pair2"]}))
    rest = "size.train = 10\nsplit = '1'\n[[dataset]]\nweight = 1\ngroup = 'c.toml'\n"
    (member,) = measured(f"{rest}key = 'a title'").members
    assert (member.name, member.pairs) == ("c_a title", ("pair2",))
    with pytest.raises(BlendFileError, match=r"blend.toml:8: dataset.group must name a list of shards, .* none was"):
        measured(rest)
    with pytest.raises(BlendFileError, match=r"dataset\.key must be combined with a list of shards as the group"):
        measured(f"{rest.replace('c.toml', 'x')}key = 'text'".replace("group = 'x'", "group = ['pair0']"))


@pytest.mark.parametrize("text", ["", "x", "group = []", "group = ['a']\nother = 1", "group = [1]", "[text]\nx = 1"])
def test_a_file_that_is_no_list_of_shards_is_named(data, text):
    (data / "c.toml").write_text(text)
    with pytest.raises(BlendFileError, match=r"blend.toml:7: dataset.group must name a list of shards, found c.toml: "):
        measured("size.train = 10\nsplit = '1'\n[[dataset]]\ngroup = 'c.toml'\nweight = 1")


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
        "blend.toml:10: dataset.glob must match complete pairs, found pair1.idx without its .bin; "
        'incomplete = "skip" ignores such files',
        "blend.toml:10: dataset.glob names pair2.idx: the magic must be b'MMIDIDX\\x00\\x00', found b'xxxxxxxxx'",
        "blend.toml:13: dataset.group must match at least one .idx file, found none for none*",
        "blend.toml:13: dataset.group must name each pair of a split once, found pair0, which is that of line 10 "
        "('pair*'); `repeated = true` in its [[dataset]] says that it is meant",
    ]


PATTERNS = ["glob = 'pair*'", "group = ['pair0', 'pair[12]*']\nname = 'g'", "glob = 'pair*.bin'", "glob = 'pair*.idx'"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("gone", "left"), [("pair1.idx", "pair1.bin"), ("pair2.bin", "pair2.idx")])
def test_half_a_pair_among_the_matches_of_a_pattern_is_named_unless_it_is_skipped(data, pattern, gone, left):
    text = f"split = '1'\nsize.train = 5\n[[dataset]]\n{pattern}\nweight = 1\n"
    whole = measured(text)
    (data / gone).unlink()
    what = f'must match complete pairs, found {left} without its {gone[-4:]}; incomplete = "skip" ignores such files'
    with pytest.raises(BlendFileError, match=re.escape(what)) as caught:
        measured(text)
    assert len(caught.value.problems) == 1
    with pytest.raises(BlendFileError, match=re.escape(what)):
        measured(text + "incomplete = 'error'")
    found = measured(text + "incomplete = 'skip'")
    pairs = [pair for member in whole.members for pair in member.pairs if pair != gone[:-4]]
    assert [pair for member in found.members for pair in member.pairs] == pairs


def test_where_half_pairs_are_all_that_a_pattern_matches_nothing_is_left_after_skipping_them(data):
    for number in range(3):
        (data / f"pair{number}.idx").unlink()
    text = "split = '1'\nsize.train = 5\n[[dataset]]\nglob = 'pair*'\nweight = 1\nincomplete = 'skip'"
    with pytest.raises(
        BlendFileError, match=r"dataset\.glob must match at least one \.idx file, found none for pair\*"
    ):
        measured(text)


def test_a_pair_whose_writer_was_killed_says_how_to_finish_it(data):
    for name in ("pair1.idx", "pair1.trackbed.json"):
        (data / name).touch()
        (data / name).rename(f"{name}.pending")
    with pytest.raises(BlendFileError, match=r"pair1\.bin without its \.idx; .*: run trackbed finish pair1"):
        measured("split = '1'\nsize.train = 5\n[[dataset]]\nglob = 'pair*'\nweight = 1")


def test_of_many_problems_twenty_are_shown_and_all_are_kept(data):
    entries = "".join(f"[[dataset]]\npath = 'nowhere{number}'\nweight = 1\n" for number in range(1025))
    with pytest.raises(BlendFileError) as caught:
        measured(f"split = '1'\nsize.train = 5\n{entries}")
    assert len(caught.value.problems) == 1025
    assert len(str(caught.value).splitlines()) == 21
    assert str(caught.value).endswith("\nand 1,005 more problems")
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"first": "epochs = 1e308"}, "datasets must give fewer than 2**62 samples by their epochs, found inf"),
        ({"first": "epochs = 2e17"}, "samples by their epochs, found 7,487,500,000,000,000,000"),
        ({"first": "epochs = 1" + "0" * 300}, "datasets must give fewer than 2**62 samples by their epochs, found "),
        ({"first": "weight = 1e308", "second": "weight = 1e308"}, "weights must have a finite sum, found that 2 of up"),
        (
            {"first": "ratio = 1e308", "second": "ratio = 1"},
            "weights must have a finite sum, found that 2 of up to inf",
        ),
        (
            {"size": str(2**63 - 1)},
            "the size of split train must be below 2**62 samples, found 9,223,372,036,854,775,807",
        ),
        ({"size": str(2**62)}, "the size of split train must be below 2**62 samples, found 4,611,686,018,427,387,904"),
        ({"options": "mid_level_dataset_surplus = 1e308"}, "mid_level_dataset_surplus must leave fewer than 2**62 sam"),
    ],
)
def test_numbers_that_no_index_can_have_are_refused_in_one_sentence(data, order, change, expected):
    text = (
        f"order = '{order}'\nsplit = '1'\nsize.train = {change.get('size', 5)}\n"
        f"[[dataset]]\npath = 'pair0'\n{change.get('first', 'weight = 1')}\n"
        f"[[dataset]]\npath = 'pair1'\n{change.get('second', 'weight = 1')}\n[options]\n{change.get('options', '')}\n"
    )
    with pytest.raises((BlendFileError, ArgumentError), match=re.escape(expected)):
        plan_blend(measured(text))


def test_pairs_of_different_types_are_no_group(data):
    write_pair(data / "wide", [5], dtype="int32")
    with pytest.raises(
        BlendFileError, match=r"blend.toml:6: dataset.group names g: .* found uint16 in pair0 and int32"
    ):
        measured("split = '1'\n[[dataset]]\ngroup = ['pair0', 'wide']\nname = 'g'")


def test_contradictory_fields_are_reported_with_the_line_of_the_option(data):
    text = "split = '1'\nsize.train = 5\n[[dataset]]\npath = 'pair0'\nweight = 1\n[options]\nshuffle_block = 4\n"
    with pytest.raises(
        BlendFileError, match=r"blend.toml:10: options.shuffle_block .*needs order='instant' or 'packed'"
    ):
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
    return DatasetRequest(measure=measure, amount=amount, tokens=2 * tokens, split_tokens=tokens, part=part)


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
    with pytest.raises(PlanError, match="must have tokens or weights to draw by, found 2 with neither"):
        plan_weights([wanted("ratio", 1, 0), wanted("ratio", 1, 0)], size=15, sequence_length=10)


def test_a_path_that_must_not_be_read_is_named(data, monkeypatch):
    def denied(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", f"{path}.idx")

    (data / "web").mkdir()
    monkeypatch.setattr(members, "IndexedDataset", denied)
    monkeypatch.setattr(members.os, "listdir", denied)
    monkeypatch.setattr(dataset_tables, "read_shard_list", denied)
    entries = "".join(
        f"[[dataset]]\n{entry}\n" for entry in ("path = 'pair0'", "glob = 'web/x*'", "name = 'g'\ngroup = 'c.toml'")
    )
    with pytest.raises(BlendFileError) as caught:
        measured(f"split = '1'\n{entries}".replace("[[dataset]]\nname = 'g'\ngroup = 'c.toml'\n", ""))
    assert caught.value.problems == (
        "blend.toml:6: dataset.path names pair0.idx: the path must be readable, found: Permission denied",
        "blend.toml:8: dataset.glob names web.idx: the path must be readable, found: Permission denied",
    )
    with pytest.raises(BlendFileError, match=r"a list of shards, found c.toml.idx: the path must be readable, found: "):
        measured(f"split = '1'\n{entries}")


def test_a_list_of_shards_in_the_place_of_a_pair_gets_a_hint(data):
    (data / "c.toml").write_text(shard_list_text({"text": ["pair0"]}))
    text = 'must name a pair, found a list of shards; use group = "c.toml" instead'
    with pytest.raises(BlendFileError, match=rf"blend\.toml:6: dataset\.path {re.escape(text)}"):
        measured("split = '1'\n[[dataset]]\npath = 'c.toml'")


def test_a_missing_pair_gets_a_hint(data):
    with pytest.raises(BlendFileError) as caught:
        measured("split = '1'\n[[dataset]]\npath = 'pair'\n[[dataset]]\npath = 's3:/bucket/key'")
    first, second = caught.value.problems
    assert first.endswith("missing pair.idx and pair.bin; did you mean pair2, pair1 or pair0?")
    assert second.endswith("; pass an address as a string: Path turns s3:// into s3:/")


PAIRS = (
    "size.train = 10\nsplit = '1'\n[[dataset]]\npath = 'pair0'\nweight = 1\n"
    "[[dataset]]\nglob = 'pair[12].idx'\nweight = 1"
)


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ('"nowhere.json"', ["blend.toml:4: tokenizer must be one that can be opened, but: ", "found none"]),
        ('"bytes"', []),
        (f'"null:{VOCAB}"', []),
        (f"{{eod = {VOCAB}, vocab_size = {VOCAB + 1}}}", []),
        ('"null:50"', ["blend.toml:8: dataset.path must have tokens of the blend's tokenizer, which are below 51"]),
        ("{eod = 5, vocab_size = 60}", ["pair0.bin: another tokenizer made them\n", "pair1.bin: another"]),
    ],
)
def test_a_tokenizer_that_the_tokens_are_not_of_is_an_error(data, tokenizer, words):
    blend = measured(f"tokenizer = {tokenizer}\n{PAIRS}")
    if not words:
        assert blend.config().tokenizer is not None
        return
    with pytest.raises(BlendFileError) as caught:
        blend.config()
    for word in words:
        assert word in str(caught.value)


def test_a_tokenizer_of_the_caller_is_not_said_to_be_at_a_line(data):
    blend = measured(f"tokenizer = 'bytes'\n{PAIRS}")
    other = measure_blend(with_tokenizer(blend.file, "nowhere.json"))
    with pytest.raises(BlendFileError, match=r"blend.toml:1: tokenizer must be one that can be opened, but: "):
        other.config()
