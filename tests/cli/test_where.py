"""`trackbed where`, and the sources that `trackbed show` names."""

import json
import time

import pytest
from click.testing import CliRunner

import trackbed
from tests.ledger.test_steering import STAGE, steps_of
from tests.support.files.rewrite import rewrite
from trackbed.cli.main import trackbed as trackbed_command
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.ledger import read_run
from trackbed.loading import provenance
from trackbed.preprocess import PreprocessConfig, preprocess

BLEND = """version = 1
sequence_length = 32
order = "instant"
split = "9,1"
size = {{train = 600, valid = 5}}
tokenizer = "bytes"
[[dataset]]
path = "{folder}/one_text_document"
name = "one"
weight = 1
[[dataset]]
path = "{folder}/two_text_document"
name = "two"
weight = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two pairs with sources, of which one has none any more, and a blend of them."""
    folder = tmp_path_factory.mktemp("where")
    for name in ("one", "two"):
        lines = [json.dumps({"text": f"{name} {number} " + "x" * (7 * number % 60)}) for number in range(120)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        config = PreprocessConfig(
            inputs=(folder / f"{name}.jsonl",), output=str(folder / name), workers=1, keep_sources=name == "one"
        )
        preprocess(config, ByteTokenizer())
    (folder / "blend.toml").write_text(BLEND.format(folder=folder))
    return folder


def call(*words):
    result = CliRunner().invoke(trackbed_command, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_samples_of_a_document_are_those_that_show_names(folder):
    dataset = trackbed.open_blend(folder / "blend.toml").train
    prefix = f"{folder}/two_text_document"
    found = json.loads(call("where", prefix, 17, "--blend", folder / "blend.toml", "--json"))
    wanted = [
        position
        for position in range(len(dataset))
        if any((one.prefix, one.document) == (prefix, 17) for one in provenance(dataset, position).origins)
    ]
    assert (found["samples"], len(wanted) > 3) == (wanted, True)
    text = call("where", prefix, 17, "--blend", folder / "blend.toml")
    assert text.startswith(f"{prefix}, document 17: in {len(wanted)} samples of train\n  sample {wanted[0]:,}\n")
    other = call("where", prefix, 17, "--blend", folder / "blend.toml", "--split", "valid")
    assert "of valid\n  it belongs to another split" in other


def test_steps_of_a_document_are_those_that_were_and_will_be_fed(folder, tmp_path):
    blend, run_folder = tmp_path / "blend.toml", tmp_path / "run"
    blend.write_text((folder / "blend.toml").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trackbed.ledger.steering.SETTLE_SECONDS", 0.0)
        with trackbed.open_run(run_folder, blend=blend) as run:
            batches = iter(run.loader(batch_size=8, skip=[[20, 30]]))
            steps_of(run, 4, batches)
            rewrite(blend, blend.read_text() + STAGE.format(60, "one = 1"))
            for _ in range(30):  # the change is opened on a thread
                steps_of(run, 1, batches)
                time.sleep(0.1)
                if any(one["event"] == "blend" for one in read_run(run_folder).events):
                    break
            last = run.step
            dataset = run.train
            steps = {}
            for step, first in enumerate([0, 8, 16, *range(35, 600, 8)], 1):
                kept = [*range(first, first + 8)] if step != 3 else [16, 17, 18, 19, 31, 32, 33, 34]
                steps |= dict.fromkeys((position for position in kept if position < 600), step)
    for document in (3, 40, 77):
        prefix = f"{folder}/one_text_document"
        found = json.loads(call("where", prefix, document, "--run", run_folder, "--json"))
        wanted = [
            [steps[position], position]
            for position in steps
            if any((one.prefix, one.document) == (prefix, document) for one in provenance(dataset, position).origins)
        ]
        assert found["read"] == [pair for pair in wanted if pair[0] <= last]
        assert found["coming"] == [pair for pair in wanted if pair[0] > last]
        text = call("where", prefix, document, "--run", run_folder)
        assert text.count("was read in step") == len(found["read"])


def test_show_names_the_file_and_the_line_of_a_document(folder):
    words = ["show", folder / "blend.toml", "--sample", 5, "--lines"]
    for origin in json.loads(call(*words, "--json"))["origins"]:
        source = origin.get("source")
        assert (source is None) == ("two_text" in origin["prefix"])
        if source is not None:
            lines = (folder / "one.jsonl").read_text().split("\n")
            text = json.loads(lines[source["line"] - 1])["text"]
            assert "".join(run["text"] for run in origin["text"]) in text
            assert f"    from {folder}/one.jsonl:{source['line']}\n" in call(*words)
            assert f"    from {folder}/one.jsonl, byte {source['byte']:,}\n" in call(*words[:-1])


def test_wrong_uses_are_refused(folder, tmp_path):
    for words, found in (
        (["where", "x", "1"], "--blend or --run must be given"),
        (["where", "x", "1", "--blend", folder / "blend.toml"], "x: must be a pair of the dataset, found none of this"),
        (
            ["where", f"{folder}/one_text_document", "120", "--blend", folder / "blend.toml"],
            "document must be in [0, 120)",
        ),
        (["where", "x", "1", "--run", tmp_path], "must be the folder of a run"),
    ):
        result = CliRunner().invoke(trackbed_command, list(map(str, words)))
        assert result.exit_code != 0
        assert found in result.stderr
