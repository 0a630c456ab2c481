"""Commands with pairs at addresses."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support.files.blends import write_pairs
from tests.support.files.stored_pairs import upload
from trackbed.tokens import verify


@pytest.fixture
def prefixes(tmp_path):
    return write_pairs(tmp_path, 3)


@pytest.fixture
def addresses(bucket, prefixes):
    return [upload(bucket, prefix, f"corpora/pair{at}_text_document") for at, prefix in enumerate(prefixes)]


@pytest.fixture
def output_of(run, tmp_path, monkeypatch):
    """Runs the command line, and returns what it prints."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def invoke(*arguments, code=0):
        found = run(*arguments)
        assert found.exit_code == code, found.output
        return found.stdout + (found.stderr if code else "")

    return invoke


def test_a_pair_is_inspected_as_on_a_disk(output_of, prefixes, addresses, tmp_path):
    found = json.loads(output_of("inspect", addresses[1], "--json"))
    wanted = json.loads(output_of("inspect", prefixes[1], "--json"))
    assert {**found, "prefix": ""} == {**wanted, "prefix": ""}
    assert list((tmp_path / "xdg" / "trackbed" / "idx").rglob("*.json"))


def test_the_folder_of_copies_can_be_chosen(output_of, addresses, tmp_path):
    output_of("verify", addresses[0], "--idx-cache", tmp_path / "here")
    assert list((tmp_path / "here").rglob("*.json"))
    assert not (tmp_path / "xdg").exists()


def test_folders_files_and_prefixes_are_verified_and_sealed(output_of, bucket, addresses):
    folder = bucket.text("corpora")
    assert output_of("verify", folder, f"{addresses[0]}.idx").count(": ok: ") == 4
    assert output_of("seal", folder + "/").split() == [f"{address}.trackbed.json" for address in addresses]
    output_of("verify", "--content", folder)
    data = bytearray(bucket.get("corpora/pair1_text_document.bin"))
    data[-1] ^= 1
    bucket.put("corpora/pair1_text_document.bin", bytes(data))
    output = output_of("verify", "--content", folder, code=1)
    assert output.count(": ok: ") == 2
    assert f"{addresses[1]}.bin: the seal says CRC-32" in output


def test_what_is_missing_is_named(output_of, bucket, addresses):
    bucket.delete("corpora/pair2_text_document.bin")
    assert f"missing {addresses[2]}.bin" in output_of("verify", addresses[2], code=1)
    assert "there must be a pair, or a folder with .bin and .idx objects, found neither" in output_of(
        "verify", bucket.text("nothing/"), code=1
    )


def test_pairs_are_merged_to_a_disk(output_of, prefixes, addresses, tmp_path):
    output_of("merge", *addresses, "-o", tmp_path / "stored")
    output_of("merge", *prefixes, "-o", tmp_path / "local")
    assert (tmp_path / "stored.bin").read_bytes() == (tmp_path / "local.bin").read_bytes()
    assert (tmp_path / "stored.idx").read_bytes() == (tmp_path / "local.idx").read_bytes()
    verify(str(tmp_path / "stored"))


BLEND = """
version = 1
sequence_length = 16
split = "90,10,0"
cache = "cache"
{options}
[size]
train = 100
valid = 5
test = 0
[tokenizer]
eod = 100
vocab_size = 101
{datasets}
"""


def blend_file(folder, paths, *, options=""):
    folder.mkdir()
    datasets = "".join(f"[[dataset]]\n{one}\nweight = {at + 1}\n" for at, one in enumerate(paths))
    (folder / "blend.toml").write_text(BLEND.format(options=options, datasets=datasets))
    return folder / "blend.toml"


@pytest.mark.parametrize("kind", ["paths", "glob", "group"])
def test_a_blend_file_with_addresses_is_planned_built_and_shown(output_of, bucket, prefixes, addresses, tmp_path, kind):
    pattern = bucket.text("corpora/pair*_text_document")
    entries = {
        "paths": [f'path = "{address}"\nname = "pair{at}"' for at, address in enumerate(addresses)],
        "glob": [f'glob = "{pattern}"'],
        "group": [f'name = "all"\ngroup = ["{pattern}.bin"]'],
    }[kind]
    local = {
        "paths": [f'path = "{prefix}"' for prefix in prefixes],
        "glob": [f'glob = "{tmp_path}/pair?"'],
        "group": [f'name = "all"\ngroup = ["{tmp_path}/pair?"]'],
    }[kind]
    stored, disk = blend_file(tmp_path / "a", entries), blend_file(tmp_path / "b", local)
    plans = [json.loads(output_of("blend", path, "--json")) for path in (stored, disk)]
    for plan in plans:
        for split in plan["splits"]:
            for dataset in split["datasets"]:
                dataset["name"] = dataset["prefix"] = dataset["entry"] = ""
    assert plans[0] == plans[1]
    output_of("build", stored, "--idx-cache", tmp_path / "idx")
    samples = [json.loads(output_of("show", path, "--sample", "7", "--json")) for path in (stored, disk)]
    texts = [[origin["text"] for origin in sample["origins"]] for sample in samples]
    assert texts[0] == texts[1]
    assert str(bucket.text("corpora")) in samples[0]["origins"][0]["prefix"]


def test_half_a_pair_among_the_matches_is_an_error(output_of, bucket, addresses, tmp_path):
    bucket.delete("corpora/pair1_text_document.idx")
    path = blend_file(tmp_path / "a", [f'glob = "{bucket.text("corpora/pair*")}"'])
    assert f"{addresses[1]}.bin without its .idx" in output_of("blend", path, code=1)


def test_mapping_is_refused_where_it_is_asked_for(output_of, addresses, tmp_path):
    path = blend_file(tmp_path / "a", [f'path = "{addresses[0]}"'])
    path.write_text(path.read_text() + "[options]\nmmap_bin_files = true\n")
    assert "mmap must be False for a pair in an object store" in output_of("build", path, code=1)


def test_shards_in_a_bucket_are_merged_and_read_by_their_list(output_of, bucket, tmp_path):
    lines = "".join(json.dumps({"text": f"text number {at}"}) + "\n" for at in range(300))
    bucket.put("raw/corpus.jsonl", lines.encode())
    (tmp_path / "corpus.jsonl").write_text(lines)
    common = ["--tokenizer", "bytes", "--append-eod", "--workers", "1"]
    output_of("preprocess", bucket.text("raw"), "-o", bucket.text("tokens/c"), "--shard-bytes", "2KB", *common)
    output_of("preprocess", tmp_path / "corpus.jsonl", "-o", tmp_path / "whole", *common)
    output_of("merge", bucket.text("tokens/c.toml"), "-o", tmp_path / "merged")
    assert (tmp_path / "merged.bin").read_bytes() == (tmp_path / "whole_text_document.bin").read_bytes()
    assert (tmp_path / "merged.idx").read_bytes() == (tmp_path / "whole_text_document.idx").read_bytes()
    assert output_of("verify", "--content", bucket.text("tokens/c.toml")).count(": ok: ") == 5
    stored = blend_file(tmp_path / "a", [f'group = "{bucket.text("tokens/c.toml")}"'])
    local = blend_file(tmp_path / "b", [f'path = "{tmp_path}/merged"'])
    for path in (stored, local):
        path.write_text(path.read_text().replace("eod = 100\nvocab_size = 101", "eod = 256\nvocab_size = 257"))
        output_of("build", path)
    samples = [json.loads(output_of("show", path, "--sample", "3", "--json"))["origins"] for path in (stored, local)]
    assert [origin["text"] for origin in samples[0]] == [origin["text"] for origin in samples[1]]


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_the_end_of_a_program_meets_no_thread_of_the_store(addresses, tmp_path, count):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(count):
        command = [sys.executable, "-m", "trackbed", "verify", *addresses]
        assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("is_stored", [False, True])
def test_shards_that_are_cut_in_another_way_are_not_left_beside_new_ones(output_of, bucket, tmp_path, is_stored):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": f"text {at}"}) + "\n" for at in range(300)))
    output = bucket.text("tokens/c") if is_stored else str(tmp_path / "c")
    common = ["preprocess", tmp_path / "corpus.jsonl", "-o", output, "--tokenizer", "bytes", "--workers", "1"]
    output_of(*common, "--shard-bytes", "2KB")
    error = output_of(*common, "--shard-bytes", "4KB", code=1)
    assert "must have no shards that are cut in another way, found some of 4, now 2" in error
    output_of("seal", f"{output}-00000-of-00004_text_document")
    assert "finished before 4" in output_of(*common, "--shard-bytes", "2KB")
    output_of(*common, "--shard-bytes", "4KB", "--overwrite")


@pytest.mark.parametrize("kind", ["paths", "group", "shards"])
def test_ctrl_c_ends_the_wait_for_a_store_that_does_not_answer(bucket, tmp_path, proxy, addresses, kind):
    """Wherever it waits: at the headers of pairs, or at the seals of shards, which threads of their own look up."""
    entries = {
        "paths": [f'path = "{address}"\nname = "{at}"' for at, address in enumerate(addresses)],
        "group": [f'name = "all"\ngroup = ["{addresses[0]}", "{addresses[1]}"]'],
        "shards": [],
    }[kind]
    blend = blend_file(tmp_path / "a", entries)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n' * 9)
    shards = ["preprocess", "in.jsonl", "--tokenizer", "bytes", "-o", bucket.text("out/c"), "--shard-bytes", "20"]
    waits, proxy.stall_seconds = threading.Event(), 60

    def stall(_headers):
        _, key, _ = proxy.log[-1]
        if key.endswith(".trackbed.json" if kind == "shards" else ".idx"):
            proxy.faults.append("stall")
            waits.set()

    proxy.look = stall
    process = subprocess.Popen(
        [sys.executable, "-m", "trackbed", *(shards if kind == "shards" else ["blend", str(blend)])],
        cwd=tmp_path,
        env={**os.environ, "TRACKBED_STORE_TIMEOUT": "60", "XDG_CACHE_HOME": str(tmp_path / "xdg")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waits.wait(60)
    time.sleep(0.2)  # the other requests of the round
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    assert time.monotonic() - started < 5


def test_a_second_build_asks_for_the_tag_of_each_object_once(output_of, bucket, addresses, tmp_path, proxy):
    grouped = [f'name = "all"\ngroup = ["{addresses[0]}", "{addresses[1]}"]', f'path = "{addresses[2]}"']
    path = blend_file(tmp_path / "a", grouped)
    output_of("build", path)
    proxy.log.clear()
    output_of("build", path)
    assert {method for method, _, _ in proxy.log} == {"HEAD"}
    assert len(proxy.log) == len(set(proxy.log)) == 2 * len(addresses)


SECRET = "s3://bucket/a?X-Amz-Signature=SECRETPW"


@pytest.mark.parametrize(
    "arguments",
    [
        ["blend", SECRET],
        ["build", SECRET],
        ["show", SECRET, "--sample", "1"],
        ["merge", "a", "-o", SECRET],
        ["cache", "gc", SECRET],
        ["train-tokenizer", SECRET, "--output", "t.json"],
        ["preprocess", "in.jsonl", f"--tokenizer={SECRET}", "--output", "o"],
        ["inspect", "https://user:SECRETPW@host/a"],
    ],
)
def test_an_address_with_a_secret_is_not_repeated(run, arguments):
    found = run(*arguments)
    assert found.exit_code == 2
    assert "an address must have no user, password, query or fragment, found one (not repeated here)" in found.stderr
    assert "SECRETPW" not in found.stdout + found.stderr
