"""Masks of one byte a token become the trained tokens of a pair."""

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from trackbed.cli.main import trackbed
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDatasetBuilder, foreign_masks, seal, verify_content
from trackbed.tokens.foreign_masks import runs_of_documents, take_mask
from trackbed.tokens.trained_tokens import TrainedTokens


@pytest.fixture
def pair(tmp_path):
    """A pair of 500 documents of 0 to 19 tokens, some of two sequences."""
    rng = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(str(tmp_path / "pair.bin"), np.uint16)
    lengths = []
    for number in range(500):
        sizes = [int(size) for size in rng.integers(0, 10, 1 + number % 2)]
        builder.add_document(np.arange(sum(sizes)), sizes)
        lengths.append(sum(sizes))
    builder.finalize(str(tmp_path / "pair.idx"))
    return str(tmp_path / "pair"), lengths


def masks_of(prefix, lengths):
    trained = TrainedTokens.open(prefix)
    return np.concatenate([trained.of(number, length) for number, length in enumerate(lengths)])


@pytest.mark.parametrize("kind", ["bytes", "bool", "int8"])
def test_each_byte_is_its_tokens(pair, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(foreign_masks, "_STEP_DOCUMENTS", 7)
    prefix, lengths = pair
    wanted = np.random.default_rng(2).random(sum(lengths)) < 0.6
    path = tmp_path / ("mask.lsm" if kind == "bytes" else "mask.npy")
    if kind == "bytes":
        path.write_bytes(wanted.astype(np.uint8).tobytes())
    else:
        np.save(path, wanted.astype(kind))
    before = (tmp_path / "pair.bin").read_bytes()
    found = CliRunner().invoke(trackbed, ["seal", prefix, "--mask", str(path)])
    assert found.exit_code == 0, found.output
    assert f"{wanted.sum():,} trained tokens" in found.output
    verify_content(prefix)
    assert (masks_of(prefix, lengths) == wanted).all()
    assert (tmp_path / "pair.bin").read_bytes() == before
    borders = np.cumsum(lengths) - lengths
    first = [bool(wanted[at]) for at, length in zip(borders, lengths, strict=True) if length]
    parts = np.split(wanted, borders[1:])
    counts = TrainedTokens.open(prefix).counts()
    assert (counts.tokens, counts.first_tokens) == (wanted.sum(), sum(first))
    assert counts.untrained == sum(not part[1:].any() for part in parts)
    shown = CliRunner().invoke(trackbed, ["inspect", prefix]).output
    assert f"documents without a label {counts.untrained:,}" in shown


@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=8))
def test_runs_end_with_their_documents(documents):
    flags = np.array([flag for one in documents for flag in one], dtype=np.bool_)
    counts, runs = runs_of_documents(flags, np.array(list(map(len, documents))))
    found = [[False] * len(one) for one in documents]
    for document, (start, count) in zip(np.repeat(np.arange(len(documents)), counts), runs.tolist(), strict=True):
        assert count > 0
        found[document][start : start + count] = [True] * count
    assert found == documents


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"\1\0", ArgumentError, "one byte for each of"),
        (None, FormatError, "bytes of 0 and 1, found 2 at token"),
    ],
)
def test_masks_of_other_tokens_are_refused_and_nothing_is_written(pair, tmp_path, content, error, message):
    prefix, lengths = pair
    (tmp_path / "mask").write_bytes(content or b"\0" * (sum(lengths) - 1) + b"\2")
    with pytest.raises(error, match=message):
        take_mask(prefix, tmp_path / "mask")
    np.save(tmp_path / "mask.npy", np.zeros((2, 3)))
    with pytest.raises(FormatError, match="array"):
        take_mask(prefix, tmp_path / "mask.npy")
    assert not (tmp_path / "pair.mask").exists()
    seal(prefix)
    assert TrainedTokens.open(prefix) is None


def test_a_mask_and_a_seal_that_do_not_belong_together_are_refused(pair, tmp_path):
    prefix, lengths = pair
    (tmp_path / "mask.lsm").write_bytes(bytes(sum(lengths)))
    take_mask(prefix, tmp_path / "mask.lsm")
    with pytest.raises(FormatError, match="a mask must be named by the seal of its pair"):
        TrainedTokens.open(prefix)
    seal(prefix)
    assert TrainedTokens.open(prefix).counts().tokens == 0
    (tmp_path / "pair.mask").unlink()
    with pytest.raises(FormatError, match="the mask must be beside its pair, as the seal names it"):
        TrainedTokens.open(prefix)


def test_a_mask_of_other_documents_is_not_sealed(pair, tmp_path):
    prefix, lengths = pair
    (tmp_path / "mask.lsm").write_bytes(b"\1" * sum(lengths))
    take_mask(prefix, tmp_path / "mask.lsm")
    raw = bytearray((tmp_path / "pair.mask").read_bytes())
    raw[-4:] = (200).to_bytes(4, "little")
    (tmp_path / "pair.mask").write_bytes(raw)
    found = CliRunner().invoke(trackbed, ["seal", prefix])
    assert found.exit_code == 1
    assert "a run must lie in" in found.output + str(found.exception)
    raw[32:40] = (999).to_bytes(8, "little")
    (tmp_path / "pair.mask").write_bytes(raw)
    found = CliRunner().invoke(trackbed, ["seal", prefix])
    assert "must have rising numbers of runs" in found.output + str(found.exception)
