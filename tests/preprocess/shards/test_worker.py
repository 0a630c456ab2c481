import pickle
import socket
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trackbed import __version__
from trackbed.datasets.tokenizers.base import OpenedAs
from trackbed.errors import TrackbedError
from trackbed.preprocess import PreprocessConfig, open_tokenizer, preprocess
from trackbed.preprocess.shards.spec import Probe, ShardSpec
from trackbed.preprocess.shards.task import ShardWorker
from trackbed.tokens import IndexedGroup
from trackbed.tokens.shard_list import read_shard_list, shard_list_text
from trackbed.tokens.write_index import write_index


def spec_of(tmp_path, **options):
    found = ShardSpec(
        output=str(tmp_path / "c"),
        num_shards=1,
        shard_bytes=100,
        json_keys=("text",),
        level="document",
        append_eod=False,
        skip_bad=False,
        max_record_bytes=100,
        chunk_bytes=100,
        overwrite=False,
        tokenizer=OpenedAs(name="bytes", lower_case=False, eod_token=None, special_tokens=False),
        tokenizer_fingerprint="bytes",
        dtype="uint16",
        eod=None,
        splitter=None,
        splitter_fingerprint="",
        trackbed=__version__,
        probe=None,
    )
    return replace(found, **options)


def test_a_worker_that_fits_has_nothing_to_say(tmp_path):
    (tmp_path / "seen").write_text("content")
    worker = ShardWorker(spec_of(tmp_path, probe=Probe(str(tmp_path / "seen"), "content")))
    assert pickle.loads(pickle.dumps(worker))(None) == ()


def test_another_version_of_trackbed_is_refused_with_both(tmp_path):
    raw = pickle.dumps(ShardWorker(spec_of(tmp_path, trackbed="0.0.9")))
    with pytest.raises(TrackbedError, match=rf"version of the driver, 0\.0\.9, found {__version__}"):
        pickle.loads(raw)


def test_another_tokenizer_under_the_name_is_refused(tmp_path):
    worker = ShardWorker(spec_of(tmp_path, tokenizer_fingerprint="other"))
    with pytest.raises(TrackbedError, match=r"the tokenizer bytes must be that of the driver, .* other, found bytes"):
        worker(None)


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path):
    opened_as = OpenedAs(name=str(tmp_path / "t.json"), lower_case=False, eod_token=None, special_tokens=False)
    with pytest.raises(TrackbedError, match=r"must be able to open the tokenizer of the driver, found: .*t\.json"):
        ShardWorker(spec_of(tmp_path, tokenizer=opened_as))(None)


@pytest.mark.parametrize(("content", "found"), [(None, "none"), ("other", "another")])
def test_a_folder_that_is_not_that_of_the_driver_is_refused(tmp_path, content, found):
    if content is not None:
        (tmp_path / "seen").write_text(content)
    with pytest.raises(TrackbedError, match=f"as the driver has written it, found {found}: every host"):
        ShardWorker(spec_of(tmp_path, probe=Probe(str(tmp_path / "seen"), "content")))(None)


def test_a_tokenizer_is_opened_by_the_same_name_in_another_folder(tmp_path, tokenizer_file, monkeypatch):
    monkeypatch.chdir(tokenizer_file.parent)
    tokenizer = open_tokenizer(tokenizer_file.name)
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n' * 4)
    config = PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "c"), shard_bytes=40, workers=2)
    assert preprocess(config, tokenizer).shards == 2
    assert tokenizer.opened_as is not None


def test_a_group_of_4096_shards_opens_in_a_second(tmp_path):
    names = [f"c-{number:05}-of-04096_text_document" for number in range(4096)]
    for name in names:
        (tmp_path / f"{name}.bin").write_bytes(bytes(20))
        lengths, borders = np.array([4, 6], dtype=np.int32), np.array([0, 1, 2], dtype=np.int64)
        write_index(tmp_path / f"{name}.idx", np.uint16, lengths, borders, None)
    (tmp_path / "c.toml").write_text(shard_list_text({"text": names}))
    seconds = []
    for _ in range(3):  # of which one should not be disturbed by other processes
        begin = time.monotonic()
        group = IndexedGroup.open("c", read_shard_list(tmp_path / "c.toml"))
        seconds.append(time.monotonic() - begin)
    assert len(group) == 2 * 4096
    assert min(seconds) < 1


def test_a_worker_whose_host_has_other_credentials_is_refused_by_its_name(bucket, proxy):
    worker = ShardWorker(spec_of(Path(), output=bucket.text("out/c")))
    assert worker(None) == ()
    proxy.faults[:] = [403, 403]
    with pytest.raises(TrackbedError) as caught:
        worker(None)
    assert str(caught.value).startswith(f"{socket.gethostname()}: must be able to read from the store of the output")
    assert "do not reach other hosts: set them there" in str(caught.value)
