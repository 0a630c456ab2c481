import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.files.blends import write_pair, write_pairs

BLEND = """\
version = 1
sequence_length = 16
order = "instant"
split = "8,2"
[size]
train = 100
valid = 5
[[dataset]]
path = "pair0"
weight = 0.5
max_epochs = 3
[[dataset]]
glob = "pair[12]"
weight = 0.5
[[stage]]
from_sample = 60
weights = {"pair[12]" = 1}
"""


@pytest.fixture
def blend(tmp_path):
    """Writes a blend of pair0, pair1 and pair2 to the working folder. Returns the path of the blend file."""
    write_pairs(tmp_path)
    (tmp_path / "blend.toml").write_text(BLEND)
    return tmp_path / "blend.toml"


def test_it_shows_every_dataset_by_split_and_stage(run, blend):
    found = run("blend", "blend.toml")
    said = "trackbed: blend.toml names no tokenizer; the plan needs none, builds and training do\n"
    assert (found.exit_code, found.stderr) == (0, said)
    assert 'order "instant", samples of 16 tokens' in found.stdout
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("train: 2 datasets, 10") for line in lines)
    (row,) = [line.split() for line in lines if line.split()[:1] == ["pair0"]][:1]
    assert row[1:3] == ["1", "24"]
    assert row[-1] == "3"
    (stage,) = [line.split() for line in lines if line.split()[:1] == ["pair0"] and "%" in line][1:2]
    assert stage[-2:] == ["50.00%", "0.00%"]


def test_a_glob_is_one_row_with_its_pairs_unless_its_members_are_asked_for(run, blend):
    assert "pair1" not in run("blend", "blend.toml").stdout
    found = json.loads(run("blend", "blend.toml", "--json").stdout)["splits"][0]["datasets"]
    assert [one["entry"] for one in found] == ["pair0", "pair[12]", "pair[12]"]
    assert [one["documents"] for one in found] == [24, 48, 72]
    text = run("blend", "blend.toml").stdout
    (row,) = [line.split() for line in text.split("valid")[0].splitlines() if line.split()[:2] == ["pair[12]", "2"]]
    assert row[2] == "120"
    members = run("blend", "blend.toml", "--members").stdout.split("valid")[0]
    rows = [line.split() for line in members.splitlines() if line.split()[:1] in (["pair1"], ["pair2"])]
    assert sorted(row[:3] for row in rows if "." not in row[1]) == [["pair1", "1", "48"], ["pair2", "1", "72"]]
    assert "pair[12]" not in members


def test_documents_are_those_of_the_split(run, blend):
    _, valid = json.loads(run("blend", "blend.toml", "--json").stdout)["splits"]
    assert [one["documents"] for one in valid["datasets"]] == [6, 12, 18]


def test_more_samples_than_were_asked_for_are_explained(run, tmp_path):
    write_pairs(tmp_path)
    text = BLEND.replace('order = "instant"\n', "").replace("max_epochs = 3\n", "").split("[[stage]]")[0]
    (tmp_path / "blend.toml").write_text(text.replace("train = 100", "train = 3001"))
    lines = run("blend", "blend.toml").stdout.splitlines()
    assert "train: 3,003 samples for 3,001 asked for, as the share of each dataset is rounded up" in lines
    (line,) = [line for line in lines if line.startswith("train: indices are built for at least 3,0")]
    assert line.endswith(" samples, as mid_level_dataset_surplus adds 0.5 % to the share of each dataset, rounded up")
    plain = text.replace("train = 100", "train = 4").replace("valid = 5", "valid = 4").replace("[options]", "")
    (tmp_path / "blend.toml").write_text(
        plain.replace('glob = "pair[12]"', 'path = "pair1"') + "[options]\nmid_level_dataset_surplus = 0\n"
    )
    assert " as " not in run("blend", "blend.toml").stdout


def test_nothing_is_wrapped_in_a_pipe(run, tmp_path):
    name = "a-long-name-" * 10
    write_pair(tmp_path / name, [20] * 30)
    (tmp_path / "blend.toml").write_text(
        f"version = 1\nsequence_length = 16\nsplit = '1'\nsize.train = 9\n[[dataset]]\npath = '{name}'\nweight = 1\n"
    )
    assert any(name in line and "100.00%" in line for line in run("blend", "blend.toml").stdout.splitlines())


def test_programs_get_json(run, blend):
    found = json.loads(run("blend", "blend.toml", "--json").stdout)
    train, valid = found["splits"]
    assert (found["order"], train["split"], valid["split"]) == ("instant", "train", "valid")
    assert sum(one["samples"] for one in train["datasets"]) == train["samples"]
    assert [stage["first_sample"] for stage in train["stages"]] == [0, 60]


@pytest.mark.parametrize(("option", "samples"), [(["--samples", "1K"], 1000), (["--tokens", "0.8M"], 50_000)])
def test_a_budget_takes_the_place_of_the_files(run, blend, option, samples):
    blend.write_text(BLEND.replace("max_epochs = 3", "").replace("from_sample = 60", "from_sample = 0"))
    found = json.loads(run("blend", "blend.toml", "--json", *option).stdout)
    assert samples <= found["splits"][0]["samples"] <= samples + 3


def test_a_dataset_that_falls_short_is_marked_and_named(run, blend):
    found = run("blend", "blend.toml", "--samples", "1K", "--plot", "plot.svg")
    assert found.exit_code == 0
    blend.write_text(BLEND.replace("max_epochs = 3", "max_epochs = 0.5"))
    found = run("blend", "blend.toml", "--plot", "plot.svg")
    assert found.exit_code == 1
    assert "0.5 short" in found.stdout
    assert found.stderr.startswith("trackbed: blend.toml:11: dataset.max_epochs of 'pair0', split train, must be at ")
    assert "short by" in found.stderr


def test_each_problem_is_a_line(run, blend):
    blend.write_text(BLEND.replace("weight = 0.5", "weight = -1"))
    found = run("blend", "blend.toml")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.splitlines() == [
        f"trackbed: blend.toml:{line}: dataset.weight must be a finite number of at least 0, found -1"
        for line in (10, 14)
    ]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_a_picture(run, blend, suffix):
    assert run("blend", "blend.toml", "--plot", f"plot.{suffix}").exit_code == 0
    raw = blend.with_name(f"plot.{suffix}").read_bytes()
    assert raw.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in raw
    assert run("blend", "blend.toml", "--plot", "plot.txt").stderr == (
        "trackbed: plot.txt: a plot's name must end in .svg, .png, .pdf, found .txt\n"
    )


def test_wrong_command_lines(run, blend):
    assert run("blend", "nowhere.toml").exit_code == 2
    assert run("blend", "blend.toml", "--tokens", "1", "--samples", "1").exit_code == 2
    assert run("blend", "blend.toml", "--tokens", "many").exit_code == 2
    assert run("blend", "blend.toml", "--samples", "0").exit_code == 2


def test_many_datasets_are_summed_up_largest_first(run, tmp_path):
    for number in range(60):
        write_pair(tmp_path / f"d{number:02}", [20] * (number + 1))
    text = "version = 1\nsequence_length = 16\nsplit = '1'\nsize.train = 500\n[[dataset]]\nglob = 'd*'\nratio = 1\n"
    (tmp_path / "blend.toml").write_text(text)
    started = time.monotonic()
    short = run("blend", "blend.toml", "--members").stdout
    assert time.monotonic() - started < 5
    names = [line.split()[0] for line in short.splitlines() if line.strip().startswith("d")][1:]
    assert set(names) == {f"d{number:02}" for number in range(40, 60)}
    assert "40 others" in short
    everything = run("blend", "blend.toml", "--members", "--all").stdout
    assert "others" not in everything
    assert "d00" in everything


def test_a_dataset_that_falls_short_is_shown_however_small_it_is(run, tmp_path):
    for number in range(40):
        write_pair(tmp_path / f"d{number:02}", [20] * (number + 10))
    text = (
        "version = 1\nsequence_length = 16\nsplit = '1'\nsize.train = 500\n[[dataset]]\nglob = 'd[123]*'\nratio = 1\n"
    )
    (tmp_path / "blend.toml").write_text(
        text
        + "[[dataset]]\nglob = 'd0*'\nratio = 1\n".replace("d0*", "d0[1-9]")
        + "[[dataset]]\npath = 'd00'\nratio = 1\nmax_epochs = 0.1\n"
    )
    found = run("blend", "blend.toml")
    assert found.exit_code == 1
    assert "0.1 short" in found.stdout


def test_of_many_problems_twenty_are_printed_and_the_others_counted(run, blend):
    blend.write_text(BLEND + "".join(f"[[dataset]]\npath = 'gone{number}'\nweight = 1\n" for number in range(1500)))
    found = run("blend", "blend.toml")
    lines = found.stderr.splitlines()
    assert (found.exit_code, len(lines), lines[-1]) == (1, 21, "trackbed: and 1,480 more problems")
    assert lines[0].startswith("trackbed: blend.toml:19: dataset.path names gone0: ")


def test_the_arguments_of_a_megatron_job_become_a_blend_file(run, tmp_path):
    arguments = ["blend", "--from-megatron", "--data-path 30 a 70 b --split 98,1,1 --seq-length 8"]
    printed = run(*arguments).stdout
    assert run(*arguments, "blend.toml").stdout == "blend.toml is written; trackbed blend blend.toml shows its plan\n"
    assert (tmp_path / "blend.toml").read_text() == printed
    assert run(*arguments, "blend.toml").stderr == "trackbed: blend.toml: must not exist yet, found a file there\n"
    assert "Missing argument 'BLEND.toml'" in run("blend").stderr
    assert "--from-megatron excludes the options of the plan" in run(*arguments, "--json").stderr
    newer = run(*arguments, "--for", "megatron-core==99.1")
    assert (newer.exit_code, "megatron-core==99.1 is newer than 0.19" in newer.stderr) == (0, True)
    assert "newer" not in run(*arguments, "--for", "megatron-core==0.19.9").stderr
    zero = run("blend", "--from-megatron", "--data-path a --seq-length 0")
    assert (zero.exit_code, "--seq-length: must be a whole number of at least 1, found 0" in zero.stderr) == (1, True)


def test_a_plot_of_a_hundred_datasets_has_a_row_for_each_entry_and_marks_distant_limits(run, tmp_path):
    write_pairs(tmp_path, 40)
    others = "".join(f'[[dataset]]\npath = "pair{n}"\nweight = {30 - n}\n' for n in range(20))
    text = f'{others}[[dataset]]\nglob = "pair[23]?"\nweight = 400\nmax_epochs = 1e6\n'
    head = 'version = 1\nsequence_length = 16\norder = "instant"\nsplit = "1"\nsize = {train = 100}\n'
    (tmp_path / "many.toml").write_text(head + text)
    assert run("blend", "many.toml", "--plot", "many.svg").exit_code == 0
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "many.svg").read_text())
    assert texts.count("pair[23]? (20)") == 1  # a row for the glob
    assert "11 others" in texts
    assert "1e+06 ▶" in texts
    assert any(re.fullmatch(r"pair\[23\]\?  \d+%", text) for text in texts)  # a label in the area itself


def test_a_reader_of_the_tables_that_leaves_early_costs_no_picture(blend):
    reading, writing = os.pipe()
    os.close(reading)
    command = [Path(sys.executable).with_name("trackbed"), "blend", "blend.toml", "--plot", "plot.png"]
    with os.fdopen(writing, "wb") as closed:
        subprocess.run(command, cwd=blend.parent, stdout=closed, stderr=subprocess.DEVNULL, check=False)
    assert blend.with_name("plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_told_before_the_tables(run, blend, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = run("blend", "blend.toml", "--plot", "plot.png")
    assert (found.exit_code, found.stdout) == (1, "")
    assert (
        "plot.png: a plot: the library matplotlib must be installed to use this (pip install '.[plot]'" in found.stderr
    )


def test_a_plot_goes_with_json_too(run, blend):
    assert json.loads(run("blend", "blend.toml", "--json", "--plot", "plot.svg").stdout)["splits"]
    assert blend.with_name("plot.svg").exists()


def test_more_than_four_epochs_get_a_line(run, blend):
    blend.write_text(BLEND.replace("max_epochs = 3", ""))
    assert "more than 4 epochs" not in run("blend", "blend.toml", "--samples", 20).stdout
    found = run("blend", "blend.toml", "--samples", "5K")
    (line,) = [line for line in found.stdout.splitlines() if "more than 4 epochs" in line]
    assert (found.exit_code, line.startswith("train: more than 4 epochs of 'pair")) == (0, True)
