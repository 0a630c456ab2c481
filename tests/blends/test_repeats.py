"""One pair under several names in a blend file."""

import os
import shutil
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.files.blends import write_pair, write_pairs
from tests.support.files.stored_pairs import upload
from trackbed.blends import measure_blend, plan_blend, read_blend_file, read_blend_table
from trackbed.blends.members import pair_ids
from trackbed.errors import BlendFileError
from trackbed.megatron.blend_arguments.blend_of_arguments import blend_of_megatron_arguments
from trackbed.tokens.shard_list import shard_list_text

TOP = "version = 1\nsequence_length = 16\n"
SIZED = f"{TOP}split = '1'\nsize.train = 60\n"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Writes pair0, pair1 and pair2 to the working directory, and other names of the first one."""
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "linked").symlink_to(".")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"soft{suffix}").symlink_to(f"pair0{suffix}")
        (tmp_path / f"hard{suffix}").hardlink_to(tmp_path / f"pair0{suffix}")
        (tmp_path / "disk" / f"soft{suffix}").symlink_to(f"../linked/pair0{suffix}")
    (tmp_path / "half.bin").symlink_to("pair0.bin")
    shutil.copyfile(tmp_path / "pair0.idx", tmp_path / "half.idx")  # the large file linked, the small one copied
    (tmp_path / "list.toml").write_text(shard_list_text({"text": ["linked/pair0", "pair1"]}))
    return tmp_path


def entry(text, name, weight=1):
    return f"[[dataset]]\nname = '{name}'\n{text}\nweight = {weight}\n"


def plan_of(text):
    Path("blend.toml").write_text(text)
    return plan_blend(measure_blend(read_blend_file("blend.toml")))


def problems_of(text):
    with pytest.raises(BlendFileError) as caught:
        plan_of(text).problems.stop()
    return list(caught.value.problems)


OTHER_NAMES = [
    "path = 'pair0'",
    "path = 'pair0.bin'",
    "path = 'pair0.idx'",
    "path = './pair0'",
    "path = './/pair0'",
    "path = 'disk/../pair0'",
    "path = 'linked/pair0'",
    "path = 'linked/linked/pair0'",
    "path = 'linked/disk/../pair0'",
    "path = 'soft'",
    "path = 'hard'",
    "path = 'disk/soft'",
    "path = 'half'",
    "path = '{folder}/pair0'",
    "path = 'file://{folder}/pair0'",
    "path = 'file://{folder}/linked/pair0'",
    "glob = 'pair*'",
    "glob = 'so*'",
    "glob = 'linked/*0'",
    "group = ['pair1', 'soft']",
    "group = ['pair[01]']",
    "group = 'list.toml'",
]


@pytest.mark.parametrize("second", OTHER_NAMES)
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_pair_under_two_names_is_refused_with_both_lines(data, second, is_turned):
    texts = ["path = 'pair0'", second.format(folder=data)]
    first, then = reversed(texts) if is_turned else texts
    (problem,) = problems_of(SIZED + entry(first, "a") + entry(then, "b"))
    key = then.partition(" ")[0]
    assert problem.startswith(f"blend.toml:11: dataset.{key} must name each pair of a split once, found ")
    assert "of line 7 ('a')" in problem
    assert problem.endswith("`repeated = true` in its [[dataset]] says that it is meant")


@pytest.mark.parametrize("second", OTHER_NAMES)
def test_a_pair_that_is_said_to_be_repeated_is_blended(data, second):
    text = SIZED + entry("path = 'pair0'", "a") + entry(f"{second}\nrepeated = true".format(folder=data), "b")
    plan = plan_of(text)
    plan.problems.stop()
    assert plan.splits[0].samples >= 60


def test_it_is_the_second_name_that_must_say_so(data):
    text = SIZED + entry("path = 'pair0'\nrepeated = true", "a") + entry("path = 'soft'", "b")
    assert len(problems_of(text)) == 1


def test_every_further_name_must_say_so(data):
    names = [entry("path = 'pair0'", "a"), entry("path = 'soft'", "b"), entry("path = 'hard'", "c")]
    assert [problem.split(":")[1] for problem in problems_of(SIZED + "".join(names))] == ["11", "15"]


@pytest.mark.parametrize("text", ["group = ['pair0', 'soft']", "glob = '[ps]*[0t]'", "group = ['pair0', 'pair*']"])
def test_a_pattern_or_group_with_two_names_of_one_pair_is_refused(data, text):
    (problem,) = problems_of(SIZED + entry(text, "a"))
    assert problem.startswith("blend.toml:7: dataset.")
    assert "of this dataset;" in problem or "of this dataset," in problem
    plan_of(SIZED + entry(f"{text}\nrepeated = true", "a")).problems.stop()


def test_many_repeated_pairs_of_two_patterns_are_one_problem(data):
    (problem,) = problems_of(SIZED + entry("glob = 'pair*'", "a") + entry("glob = 'linked/pair*'", "b"))
    assert "found linked/pair0, which is the pair pair0 of line 7 ('a'), and 2 more pairs of it" in problem


def test_other_pairs_are_no_repetition(data):
    for suffix in (".bin", ".idx"):
        shutil.copy2(data / f"pair0{suffix}", data / f"copy{suffix}")  # equal bytes and times, but files of their own
    plan_of(SIZED + entry("glob = 'pair*'", "a") + entry("path = 'copy'", "b")).problems.stop()


def test_another_view_of_the_same_tokens_is_another_pair(data):
    write_pair(data / "other", [3, 4, 5])
    (data / "view.bin").symlink_to("pair0.bin")
    shutil.copyfile(data / "pair1.idx", data / "view.idx")
    assert len(set(pair_ids(["pair0", "view", "other"]))) == 3


def test_a_pair_may_be_in_several_splits(data):
    text = TOP + "size = {train = 20, valid = 5}\n"
    both = text + entry("path = 'pair0'\nsplits = ['train']", "a") + entry("path = 'soft'\nsplits = ['valid']", "b")
    plan_of(both).problems.stop()
    shared = both.replace("['valid']", "['valid', 'train']")
    assert len(problems_of(shared)) == 1


def test_in_a_store_the_address_counts(data, bucket, monkeypatch):
    for name in ("pair0", "pair1"):
        upload(bucket, data / name, f"in/{name}")
    first, second = bucket.text("in/pair0"), bucket.text("in/pair1")
    text = f"{SIZED}cache = 'cache'\noptions.object_storage_cache_path = 'idx'\n"
    plan_of(text + entry(f"path = '{first}'", "a") + entry(f"path = '{second}'", "b")).problems.stop()
    (problem,) = problems_of(text + entry(f"path = '{first}'", "a") + entry(f"path = '{first}.bin'", "b"))
    assert "of line 9 ('a')" in problem
    (problem,) = problems_of(
        text + entry(f"glob = '{bucket.text('in/pair*')}'", "a") + entry(f"path = '{second}'", "b")
    )
    assert f"found {second}" in problem


def test_an_argument_without_lines_names_the_dataset(data):
    entries = [{"path": "pair0", "name": "a", "weight": 1}, {"path": "soft", "name": "b", "weight": 1}]
    table = {"sequence_length": 16, "split": "1", "size": {"train": 20}, "dataset": entries}
    with pytest.raises(BlendFileError, match="found soft, which is the pair pair0 of 'a';"):
        measure_blend(read_blend_table(table, where="arguments"))


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
def test_a_limit_counts_the_pair_and_not_the_name(data, order):
    top = f"{TOP}order = '{order}'\nsplit = '1'\nsize.train = "
    limit = "max_epochs = 2"
    first = entry(f"path = 'pair0'\n{limit}", "a")
    second = entry("path = 'soft'\nrepeated = true", "b")
    per_epoch = 2 * plan_of(f"{top}1\n" + first).splits[0].datasets[0].tokens // 16 // 2
    enough = plan_of(f"{top}{2 * per_epoch - 4}\n" + first + second)
    enough.problems.stop()
    alone = plan_of(f"{top}{4 * per_epoch - 12}\n" + first + entry("path = 'pair2'", "b"))
    alone.problems.stop()
    (problem,) = problems_of(f"{top}{4 * per_epoch - 12}\n" + first + second)
    assert problem.startswith("blend.toml:9: dataset.max_epochs of 'a', split train, must be at least ")
    assert "together with 'b', which repeats its pairs, found 2" in problem


def test_a_limit_of_the_second_name_counts_the_first_one_too(data):
    first = entry("path = 'pair0'", "a", weight=9)
    second = entry("path = 'soft'\nrepeated = true\nmax_epochs = 2", "b")
    (problem,) = problems_of(f"{TOP}split = '1'\nsize.train = 400\n" + first + second)
    assert problem.startswith("blend.toml:13: dataset.max_epochs of 'b', split train, must be at least ")


def test_a_limit_of_a_group_counts_its_pairs_twice_if_it_has_them_twice(data):
    group = "group = ['pair0', 'soft']\nrepeated = true\nmax_epochs = 3"
    tokens = plan_of(f"{TOP}split = '1'\n" + "[[dataset]]\npath = 'pair0'\n").splits[0].tokens
    plan_of(f"{TOP}split = '1'\nsize.train = {tokens // 16 * 3 - 3}\n" + entry(group, "g")).problems.stop()
    (problem,) = problems_of(f"{TOP}split = '1'\nsize.train = {tokens // 16 * 4}\n" + entry(group, "g"))
    assert "dataset.max_epochs of 'g'" in problem


def test_a_limit_that_the_order_cannot_keep_is_refused(data):
    text = (
        f"{TOP}order = 'instant'\nsplit = '1'\nsize.train = 60\noptions.blend_when_exhausted = 'reweight'\n"
        + entry("path = 'pair0'\nmax_epochs = 9", "a")
        + entry("path = 'soft'\nrepeated = true", "b")
    )
    (problem,) = problems_of(text)
    assert 'dataset.max_epochs must be omitted with options.blend_when_exhausted = "reweight" for a pair' in problem


def test_a_limit_that_the_order_can_keep_is_not_refused(data):
    text = (
        f"{TOP}order = 'instant'\nsize = {{train = 60, valid = 5}}\noptions.blend_when_exhausted = 'reweight'\n"
        + entry("path = 'pair0'\nmax_epochs = 9\nsplits = ['train']", "a")
        + entry("path = 'pair1'\nsplits = ['train']", "b")
        + entry("path = 'soft'\nsplits = ['valid']", "c")
    )
    plan_of(text).problems.stop()


def test_more_than_four_epochs_of_a_dataset_are_told(data):
    (split,) = plan_of(f"{TOP}split = '1'\nsize.train = 60\n" + entry("path = 'pair0'", "a")).splits
    assert not any("epochs" in note for note in split.notes)
    many = SIZED.replace("60", "900") + entry("path = 'pair0'", "a") + entry("path = 'pair2'", "b", weight=0.001)
    (split,) = plan_of(many).splits
    (note,) = [note for note in split.notes if "epochs" in note]
    assert note.startswith("more than 4 epochs of 'a' (")
    assert "'b'" not in note


def test_epochs_of_a_repeated_pair_are_added(data):
    per_epoch = plan_of(f"{TOP}split = '1'\n[[dataset]]\npath = 'pair0'\n").splits[0].tokens // 16
    text = f"{TOP}split = '1'\nsize.train = {5 * per_epoch}\n" + entry("path = 'pair0'", "a")
    (split,) = plan_of(text + entry("path = 'soft'\nrepeated = true", "b")).splits
    assert max(one.epochs for one in split.datasets) < 4
    assert "more than 4 epochs of 'a' (4.97), 'b' (4.97)" in "".join(split.notes)


def test_a_job_that_repeats_a_prefix_becomes_a_file_that_says_so(data):
    job = "--seq-length 16 --train-iters 10 --global-batch-size 4 --split 1"
    words = "1 pair0 2 pair1 3 pair0 1 ./pair0 1 soft 1 hard"
    text = blend_of_megatron_arguments(f"--data-path {words} {job}")
    entries = tomllib.loads(text)["dataset"]
    assert [one.get("repeated") for one in entries] == [None, None, True, True, True, True]
    Path("blend.toml").write_text(text)
    measure_blend(read_blend_file("blend.toml"))


def test_a_job_that_repeats_a_prefix_that_is_not_here_says_so_too(data):
    text = blend_of_megatron_arguments("--data-path 1 gone/a 1 gone//a 1 gone/b/../a 1 linked/gone/a --seq-length 16")
    assert [one.get("repeated") for one in tomllib.loads(text)["dataset"]] == [None, True, True, True]


def test_a_prefix_in_two_splits_of_a_job_is_not_repeated(data):
    text = blend_of_megatron_arguments("--train-data-path 1 pair0 1 pair0 --valid-data-path 1 pair0 --seq-length 16")
    assert [one.get("repeated") for one in tomllib.loads(text)["dataset"]] == [None, True, None]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([".", "linked", "disk/..", "./linked/."]), max_size=4), min_size=2, max_size=4)
)
def test_however_a_path_is_spelt_it_is_the_same_pair(tmp_path_factory, detours):
    folder = tmp_path_factory.getbasetemp() / "spelt"
    if not folder.exists():
        (folder / "disk").mkdir(parents=True)
        (folder / "linked").symlink_to(".")
        write_pair(folder / "pair", [3, 4])
        write_pair(folder / "other", [3, 4])
    names = ["/".join([os.fspath(folder), *steps, "pair"]) for steps in detours]
    *same, other = pair_ids([*names, f"{folder}/other"])
    assert len(set(same)) == 1
    assert other not in same
