"""Pairs in a bucket, compared with the same pairs on the disk."""

import pickle

import numpy as np
import pytest

from tests.support.files.built_pair import build
from tests.support.files.stored_pairs import open_stored, upload
from trackbed.blends import read_blend_file
from trackbed.errors import ArgumentError, FormatError, StoreError
from trackbed.tokens import IndexedDataset, IndexedGroup, ObjectStorageConfig, merge, seal, verify, verify_content
from trackbed.tokens.read_headers import read_headers

HEAD = "bytes=0-4129"


def documents_of(count, *, seed=0, longest=9):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 900, rng.integers(number % 2, longest)).tolist() for number in range(count)]


@pytest.fixture
def local(tmp_path):
    build(tmp_path / "corpus", documents_of(2000), np.uint16)
    return IndexedDataset(str(tmp_path / "corpus"))


@pytest.fixture
def address(bucket, local):
    return upload(bucket, local.path_prefix, "web/corpus")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "idx cache"


def test_a_stored_pair_is_the_pair(local, address, cache):
    stored = open_stored(address, cache)
    assert (len(stored), stored.identity) == (len(local), local.identity)
    assert stored.sequence_lengths.tolist() == local.sequence_lengths.tolist()
    assert stored.document_indices.tolist() == local.document_indices.tolist()
    for at in (0, 1, 777, -1):
        assert stored[at].tolist() == local[at].tolist()
    assert [one.tolist() for one in stored[5:90]] == [one.tolist() for one in local[5:90]]
    assert stored.get(3, offset=1, length=40).tolist() == local.get(3, offset=1, length=40).tolist()
    assert IndexedDataset.exists(address)
    assert not IndexedDataset.exists(address + "-none")


def test_a_copy_in_another_process_sends_no_request(local, address, cache, proxy):
    stored = open_stored(address, cache)
    proxy.log.clear()
    copy = pickle.loads(pickle.dumps(stored))
    assert proxy.log == []
    assert copy[7].tolist() == local[7].tolist()


def test_modes_are_read(bucket, tmp_path, cache):
    build(tmp_path / "modes", [], np.int32, multimodal=True)
    from trackbed.tokens import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path}/modes.bin", np.int32, multimodal=True)
    builder.add_document([1, 2, 3], [2, 1], modes=[0, 1])
    builder.finalize(f"{tmp_path}/modes.idx")
    stored = open_stored(upload(bucket, tmp_path / "modes", "modes"), cache, multimodal=True)
    tokens, mode = stored[1]
    assert (tokens.tolist(), mode) == ([3], 1)
    without = open_stored(upload(bucket, build_plain(tmp_path), "plain"), cache)
    with pytest.raises(FormatError, match=r"plain\.idx: an index with modes must have \d+ bytes, found"):
        open_stored(without.path_prefix, cache, multimodal=True)


def build_plain(folder):
    build(folder / "plain", [[1], [2]])
    return folder / "plain"


def test_opening_requests_a_few_ranges_and_no_whole_index(bucket, address, cache, proxy):
    open_stored(address, cache)
    log = [(method, key.rpartition("/")[2], span) for method, key, span in proxy.log]
    assert ("HEAD", "corpus.bin", None) in log
    assert ("GET", "corpus.idx", HEAD) in log
    assert len(log) <= 6
    spans = [span for method, key, span in log if key == "corpus.idx"]
    sizes = [stop - start + 1 for start, stop in (map(int, span.removeprefix("bytes=").split("-")) for span in spans)]
    assert sorted(sizes) == [4, 8, 8, 4096, 4130]


def test_a_warm_start_sends_one_head_for_each_object(local, address, cache, proxy):
    assert open_stored(address, cache)[9].tolist() == local[9].tolist()  # copies the index
    proxy.log.clear()
    warm = open_stored(address, cache)
    assert sorted(method for method, *_ in proxy.log) == ["HEAD", "HEAD"]
    assert warm.identity == local.identity
    proxy.log.clear()
    assert warm[9].tolist() == local[9].tolist()
    assert [(method, key.rpartition("/")[2]) for method, key, _ in proxy.log] == [("GET", "corpus.bin")]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_object_is_named(bucket, address, cache, suffix):
    bucket.delete("web/corpus" + suffix)
    with pytest.raises(
        ArgumentError, match=rf"{address}: a .bin and an .idx object must exist, missing {address}{suffix}"
    ):
        open_stored(address, cache)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:20], "an index header has 34 bytes, this file has 20"),
        (lambda raw: b"", "an index header has 34 bytes, this file has 0"),
        (lambda raw: b"X" + raw[1:], "the magic must be"),
        (lambda raw: raw[:-1], "this file has"),
        (lambda raw: raw[:18] + (1 << 62).to_bytes(8, "little") + raw[26:], "this file has"),
    ],
)
def test_a_damaged_index_is_refused_as_on_a_disk(bucket, address, cache, damage, words):
    bucket.put("web/corpus.idx", damage(bucket.get("web/corpus.idx")))
    with pytest.raises(FormatError, match=rf"{address}\.idx: .*{words}"):
        open_stored(address, cache)


def test_a_replaced_object_is_an_error_until_the_address_is_opened_again(bucket, tmp_path, local, address, cache):
    stored = open_stored(address, cache)
    assert stored[3].tolist() == local[3].tolist()
    build(tmp_path / "other", documents_of(2000, seed=9), np.uint16)
    upload(bucket, tmp_path / "other", "web/corpus")
    other = IndexedDataset(str(tmp_path / "other"))
    for _ in range(2):
        with pytest.raises(StoreError, match=rf"{address}\.bin: the object must be the one that was opened"):
            stored[3]
        assert open_stored(address, cache)[3].tolist() == other[3].tolist()


def test_an_index_that_was_replaced_before_it_was_copied_is_an_error(bucket, address, cache):
    stored = open_stored(address, cache)
    bucket.put("web/corpus.idx", bucket.get("web/corpus.idx") + b"")
    raw = bytearray(bucket.get("web/corpus.idx"))
    raw[5000] ^= 1
    bucket.put("web/corpus.idx", bytes(raw))
    with pytest.raises(StoreError, match=rf"{address}\.idx: the object must be the one that was opened"):
        _ = stored.sequence_lengths


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mmap": True}, "mmap must be False for a pair in an object store"),
        ({"mmap": False}, "object_storage_config must be given for a pair in an object store"),
        ({"mmap": False, "s3_config": "x"}, "object_storage_config must be an ObjectStorageConfig or None"),
    ],
)
def test_options_that_do_not_fit_an_address_are_refused_without_a_request(address, proxy, options, words):
    with pytest.raises(ArgumentError, match=f"{address}: {words}"):
        IndexedDataset(address, **options)
    assert proxy.log == []


@pytest.mark.parametrize(
    "fields",
    [{"path_to_idx_cache": ""}, {"path_to_idx_cache": "s3://a/b"}, {"path_to_idx_cache": "x", "bin_chunk_nbytes": 0}],
)
def test_options_out_of_range_are_refused(fields):
    with pytest.raises(ArgumentError, match=f"{list(fields)[-1]} must be"):
        ObjectStorageConfig(**fields)


def test_a_group_is_the_merged_pair(bucket, tmp_path, cache):
    for number in range(4):
        build(tmp_path / str(number), documents_of(30 * number, seed=number), np.uint16)
    paths = [str(tmp_path / str(number)) for number in range(4)]
    addresses = [upload(bucket, path, f"shards/{number}") for number, path in enumerate(paths)]
    merge(paths, str(tmp_path / "merged"))
    merged = IndexedDataset(str(tmp_path / "merged"))
    storage = ObjectStorageConfig(str(cache))
    stored = IndexedGroup.open("group", addresses, mmap=False, object_storage_config=storage)
    assert stored.sequence_lengths.tolist() == merged.sequence_lengths.tolist()
    assert [one.tolist() for one in stored[:]] == [one.tolist() for one in merged[:]]
    mixed = IndexedGroup.open("group", [*addresses[:2], *paths[2:]], mmap=False, object_storage_config=storage)
    assert [one.tolist() for one in mixed[:]] == [one.tolist() for one in merged[:]]


def test_headers_of_many_pairs_are_read_together(bucket, tmp_path, cache, proxy):
    build(tmp_path / "one", documents_of(9), np.uint16)
    addresses = [upload(bucket, tmp_path / "one", f"many/{number}") for number in range(12)]
    proxy.delay_seconds = 0.1
    proxy.log.clear()
    found = read_headers([*addresses, bucket.text("none"), str(tmp_path / "one")], idx_cache=str(cache))
    assert set(found) == {*addresses, str(tmp_path / "one")}
    assert len({found[address].ends.sha256 for address in found}) == 1
    assert found[addresses[0]].ends.sha256 == found[str(tmp_path / "one")].ends.sha256


def test_pairs_are_verified_merged_and_sealed_where_they_lie(bucket, tmp_path, local, address, cache):
    assert verify(address, idx_cache=str(cache)) == verify(local.path_prefix)
    merge([address, address], str(tmp_path / "twice"), idx_cache=str(cache))
    assert len(IndexedDataset(str(tmp_path / "twice"))) == 2 * len(local)
    sealed = seal(address, idx_cache=str(cache))
    assert sealed == seal(local.path_prefix)
    assert verify_content(address, idx_cache=str(cache)) == verify(local.path_prefix)
    data = bytearray(bucket.get("web/corpus.bin"))
    data[5] ^= 1
    bucket.put("web/corpus.bin", bytes(data))
    with pytest.raises(FormatError, match=rf"{address}\.bin: the seal says CRC-32"):
        verify_content(address, idx_cache=str(cache))


def _config(**options):
    from trackbed.datasets import GPTDatasetConfig, NullTokenizer

    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    return GPTDatasetConfig(random_seed=1, sequence_length=8, tokenizer=NullTokenizer(9), **flags, **options)


@pytest.mark.parametrize(
    "call",
    [
        lambda address: IndexedDataset(address),
        lambda address: IndexedDataset(address, mmap=False),
        lambda address: ObjectStorageConfig(address),
        lambda address: _config(path_to_cache=address),
        lambda address: read_blend_file(address),
        lambda address: build_of(_config(blend=([address], None), split="1")),
        lambda address: build_of(_config(blend=(["g"], None), split="1", groups={"g": [address]}, path_to_cache="c")),
    ],
)
@pytest.mark.parametrize("address", ["s3://bucket/a?X-Amz-Signature=SECRETPW", "https://user:SECRETPW@host/a"])
def test_an_address_with_a_secret_is_not_repeated(call, address):
    with pytest.raises(ArgumentError) as caught:
        call(address)
    assert "SECRETPW" not in f"{caught.value} {caught.value.__cause__}"


def build_of(config):
    from trackbed.builder import BlendedMegatronDatasetBuilder
    from trackbed.datasets import GPTDataset

    return BlendedMegatronDatasetBuilder(GPTDataset, [1, 0, 0], lambda: True, config).build()
