"""Masks of pairs in object stores are read from copies that are those of the seal."""

from pathlib import Path

import numpy as np
import pytest

import trackbed
from tests.support.files.built_pair import build
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.errors import FormatError
from trackbed.files import stores
from trackbed.files.stores import parse_address
from trackbed.tokens import IndexedDatasetBuilder, seal
from trackbed.tokens.trained_tokens import TrainedColumns, TrainedTokens, runs_of

FLAGS = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False)


@pytest.fixture
def local(tmp_path):
    """A pair of 200 documents, of whose tokens those above 500 are trained."""
    rng = np.random.default_rng(3)
    builder = IndexedDatasetBuilder(str(tmp_path / "chat.bin"), np.uint16)
    builder.trained = TrainedColumns()
    for _ in range(200):
        tokens = rng.integers(1, 1000, rng.integers(2, 40))
        builder.add_document(tokens, [len(tokens)])
        runs = runs_of(tokens > 500)
        builder.trained.add(np.array([len(runs)]), runs, lengths=np.array([len(tokens)]), where="test")
    builder.finalize(str(tmp_path / "chat.idx"))
    return str(tmp_path / "chat")


@pytest.fixture
def address(bucket, local):
    found = bucket.text("talks/chat")
    for end in ("bin", "idx", "trackbed.json", "mask"):
        stores.put_file(parse_address(f"{found}.{end}"), f"{local}.{end}")
    return found


def dataset_of(prefix, cache):
    storage = {"object_storage_cache_path": str(cache), "mmap_bin_files": False} if "://" in prefix else {}
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=64,
        blend=([prefix], None),
        split="1",
        order="packed",
        tokenizer=NullTokenizer(1000),
        **FLAGS,
        **storage,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [40, 0, 0], lambda: True, config).build()[0]


def test_batches_have_the_mask_of_the_pair_on_a_disk(local, address, tmp_path):
    found, wanted = (
        next(iter(trackbed.BatchLoader(dataset_of(prefix, tmp_path / "cache"), batch_size=20, layout="thd")))
        for prefix in (address, local)
    )
    assert 0 < wanted["loss_mask"].sum() < 0.7 * wanted["loss_mask"].numel()
    for name in wanted:
        assert (found[name] == wanted[name]).all(), name


def test_a_copy_is_fetched_once_and_again_if_it_is_damaged(local, address, tmp_path):
    folder = str(tmp_path / "copies")
    wanted = TrainedTokens.open(local).counts()
    assert TrainedTokens.open(address, idx_cache=folder).counts() == wanted
    stores.delete_object(parse_address(f"{address}.mask"))
    assert TrainedTokens.open(address, idx_cache=folder).counts() == wanted
    (copied,) = filter(Path.is_file, (tmp_path / "copies").rglob("*.mask"))
    copied.write_bytes(bytes(copied.stat().st_size))  # as after a loss of power
    with pytest.raises(FileNotFoundError):
        TrainedTokens.open(address, idx_cache=folder)
    stores.put_file(parse_address(f"{address}.mask"), f"{local}.mask")
    assert TrainedTokens.open(address, idx_cache=folder).counts() == wanted


def test_an_object_that_is_not_the_one_of_the_seal_is_refused(address, tmp_path):
    stores.put_bytes(parse_address(f"{address}.mask"), b"TBMASK\0\0 of another pair")
    with pytest.raises(FormatError, match="that the seal of its pair names"):
        TrainedTokens.open(address, idx_cache=str(tmp_path / "copies"))
    assert not list(filter(Path.is_file, (tmp_path / "copies").rglob("*")))


def test_a_pair_without_a_mask_is_trained_as_a_whole(bucket, tmp_path):
    build(tmp_path / "text", [[1, 2, 3]], np.uint16)
    for end in ("bin", "idx"):
        stores.put_file(parse_address(bucket.text(f"text.{end}")), tmp_path / f"text.{end}")
    assert TrainedTokens.open(bucket.text("text"), idx_cache=str(tmp_path / "copies")) is None


def test_a_new_seal_keeps_the_mask(local, address, tmp_path):
    wanted = TrainedTokens.open(local).counts()
    seal(address, idx_cache=str(tmp_path / "copies"))
    assert TrainedTokens.open(address, idx_cache=str(tmp_path / "copies")).counts() == wanted
