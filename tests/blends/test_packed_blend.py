"""Blend files with order = "packed": opened, planned, steered, and read by a loader."""

import re

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import trackbed
from tests.datasets.test_packed import write
from trackbed.blends import plan_blend, read_blend_file
from trackbed.blends.measure import measure_blend
from trackbed.cli.main import trackbed as trackbed_command
from trackbed.errors import BlendFileError
from trackbed.tokens import IndexedDatasetBuilder
from trackbed.tokens.trained_tokens import TrainedColumns, runs_of

BLEND = """version = 1
sequence_length = 64
order = "packed"
split = "9,1"
size = {train = 300, valid = 4}
tokenizer = "bytes"
[[dataset]]
path = "one"
weight = 3
[[dataset]]
path = "two"
weight = 1
[options]
pack_multiple = 2
pack_window = 70
"""


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(1)
    for name, most in (("one", 50), ("two", 150)):
        write(tmp_path / name, generator.integers(0, most, 300), seed=most)
    (tmp_path / "blend.toml").write_text(BLEND)
    return tmp_path


def test_a_blend_file_of_packs_is_opened_and_read(folder):
    splits = trackbed.open_blend(folder / "blend.toml")
    loader = trackbed.BatchLoader(splits.train, batch_size=4, layout="thd")
    batch = next(iter(loader))
    assert batch["tokens"].shape == (1, 4 * 64)
    assert (batch["cu_seqlens_padded"].diff() % 2 == 0).all()
    assert batch["loss_mask"].sum() == batch["cu_seqlens"][-1]
    assert len(splits.valid) == 4


def test_the_plan_counts_packs_as_the_datasets_do(folder):
    blend = measure_blend(read_blend_file(folder / "blend.toml"))
    train = plan_blend(blend).splits[0]
    built = trackbed.open_blend(folder / "blend.toml").train
    for planned, dataset in zip(train.datasets, built.datasets, strict=True):
        assert planned.epochs == pytest.approx(planned.samples / dataset.samples_per_epoch)
    found = CliRunner().invoke(trackbed_command, ["blend", str(folder / "blend.toml")])
    assert found.exit_code == 0, found.output


def test_weights_of_packs_change_while_a_run_goes_on(folder):
    with trackbed.open_run(folder / "run", blend=folder / "blend.toml") as run:
        run.set_weights(6, {"one": 0, "two": 1})
        ids = []
        for batch in run.loader(batch_size=8):
            ids.append(batch["dataset_id"].tolist())
            run.record(0.5)
            if run.step == 10:
                break
    assert {0, 1} == set(sum(ids[:5], []))
    assert set(sum(ids[5:], [])) == {1}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("pack_multiple = 2", "pack_multiple = 3", "pack_multiple must divide the sequence_length 64, found 3"),
        ("pack_window = 70", 'pack_long = "trim"', "pack_long must be one of 'split', 'cut', 'drop', found 'trim'"),
        ("pack_window = 70", "mask_borders = true", "mask_borders must be False with order='packed'"),
        ('order = "packed"', 'order = "instant"', "pack_multiple needs order='packed', found 'instant'"),
    ],
)
def test_wrong_options_are_reported_with_the_file(folder, old, new, problem):
    (folder / "blend.toml").write_text(BLEND.replace(old, new))
    with pytest.raises(BlendFileError, match=problem):
        trackbed.open_blend(folder / "blend.toml")


def test_show_has_each_document_with_its_untrained_part_marked(tmp_path):
    builder = IndexedDatasetBuilder(f"{tmp_path / 'chat'}.bin", np.uint16)
    builder.trained = TrainedColumns()
    for number in range(4):
        question, answer = f"What is {number}?".encode(), f"It is {number}.".encode()
        builder.add_document(list(question + answer), [len(question + answer)])
        runs = runs_of(np.array([False] * len(question) + [True] * len(answer)))
        builder.trained.add(np.array([1]), runs, lengths=np.array([len(question + answer)]), where="chat")
    builder.finalize(f"{tmp_path / 'chat'}.idx")
    text = (
        BLEND.split("[[dataset]]", maxsplit=1)[0]
        .replace("train = 300, valid = 4", "train = 4")
        .replace('split = "9,1"', 'split = "1"')
    )
    (tmp_path / "blend.toml").write_text(f'{text}[[dataset]]\npath = "chat"\nweight = 1\n')
    shown = []
    for sample in ("0", "1"):
        found = CliRunner().invoke(trackbed_command, ["show", str(tmp_path / "blend.toml"), "--sample", sample])
        assert found.exit_code == 0, found.output
        shown += re.findall(r"\{-(.*?)-\}(.*)", found.output)
    assert sorted(shown) == [(f"hat is {number}?", f"It is {number}.") for number in range(4)]


def test_the_plan_says_how_full_packs_are_and_what_is_cut(folder):
    shown = CliRunner().invoke(trackbed_command, ["blend", str(folder / "blend.toml")])
    assert shown.exit_code == 0, shown.output
    first, second, *_ = re.findall(r"^(?:one|two): .*", shown.output, flags=re.MULTILINE)
    assert re.fullmatch(r"one: \d+ packs an epoch, 9\d\.\d\d% full", first)
    assert re.fullmatch(
        r"two: \d+ packs an epoch, 9\d\.\d\d% full; "
        r"\d+ documents \(\d\d\.\d\d%\) of more than 65 are split \(pack_long\)",
        second,
    )
    text = (folder / "blend.toml").read_text()
    (folder / "cut.toml").write_text(text + 'pack_long = "cut"\n')
    shown = CliRunner().invoke(trackbed_command, ["blend", str(folder / "cut.toml")])
    assert re.search(r"of more than 65 lose [\d,]+ tokens$", shown.output, flags=re.MULTILINE)


def test_a_contiguous_dataset_of_a_packed_blend_has_its_text_in_order_and_each_label_once(folder):
    text = (folder / "blend.toml").read_text().replace('path = "two"', 'path = "two"\npacked = false')
    (folder / "mixed.toml").write_text(text)
    mixed = trackbed.open_blend(folder / "mixed.toml").train
    both = trackbed.open_blend(folder / "blend.toml").train
    assert [one.opened_samples.is_contiguous for one in mixed.datasets] == [False, True]
    assert mixed.fingerprint != both.fingerprint
    contiguous = mixed.datasets[1]
    pieces, _ = contiguous.opened_samples.find(np.arange(contiguous.samples_per_epoch))
    first, stop = contiguous.opened_samples.run
    lengths = contiguous.dataset.sequence_lengths[first:stop]
    assert pieces[:, 0].tolist() == sorted(pieces[:, 0])
    assert (np.diff(pieces[:, 0]) >= 0).all()
    assert (pieces[:, 2] - pieces[:, 1]).sum() == np.maximum(lengths - 1, 0).sum()
    loader = trackbed.BatchLoader(mixed, batch_size=4, shuffle_ranks=False)
    for number, batch in zip(range(5), loader, strict=False):
        for place in range(4):
            one = mixed[4 * number + place]
            for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
                assert (batch[name][place] == one[name]).all(), name
    assert set(torch.cat([batch["dataset_id"] for batch in loader]).tolist()) == {0, 1}
    balanced = trackbed.BatchLoader(mixed, batch_size=4, balanced=True, global_batch_size=8, hidden_size=64)
    assert len(next(iter(balanced))["tokens"]) == 4
    shown = CliRunner().invoke(trackbed_command, ["blend", str(folder / "mixed.toml")])
    assert re.search(r"^two: \d+ packs an epoch, 9\d\.\d\d% full$", shown.output, flags=re.MULTILINE)


def test_packed_is_refused_in_other_orders(folder):
    text = (folder / "blend.toml").read_text().split("[options]")[0].replace('"packed"', '"instant"')
    (folder / "other.toml").write_text(text.replace('path = "two"', 'path = "two"\npacked = false'))
    with pytest.raises(BlendFileError, match=r"packed needs order = 'packed', found 'instant'"):
        read_blend_file(folder / "other.toml")


def test_epochs_are_whole_passes_of_packs(folder):
    text = (folder / "blend.toml").read_text().replace("size = {train = 300, valid = 4}\n", "size = {valid = 4}\n")
    text = text.replace("weight = 3", "epochs = 2").replace("weight = 1", "epochs = 3\npacked = false")
    (folder / "epochs.toml").write_text(text)
    train = plan_blend(measure_blend(read_blend_file(folder / "epochs.toml"))).splits[0]
    built = trackbed.open_blend(folder / "epochs.toml").train
    wanted = [times * dataset.samples_per_epoch for times, dataset in zip((2, 3), built.datasets, strict=True)]
    assert [one.samples for one in train.datasets] == wanted
    assert len(built) == sum(wanted)


def test_a_mask_that_the_order_does_not_read_is_told(folder, caplog):
    (folder / "one.mask").write_bytes(b"x")
    text = (folder / "blend.toml").read_text().split("[options]")[0].replace('"packed"', '"instant"')
    (folder / "other.toml").write_text(text)
    measure_blend(read_blend_file(folder / "other.toml"))
    assert "order 'instant' does not read masks, so all tokens are trained" in caplog.text
