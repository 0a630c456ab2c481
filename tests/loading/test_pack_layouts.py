"""Layouts of packs, and their slices for context parallelism, against a plain reference."""

import numpy as np
import pytest
import torch

from tests.datasets.test_packed import packed, write
from tests.support.tiers import slow_but
from trackbed import BatchLoader
from trackbed.errors import ArgumentError
from trackbed.loading import slice_for_context
from trackbed.tokens import IndexedDataset


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory):
    """Documents of lognormal lengths, as many as fill some packs of 32,768 places."""
    lengths = np.random.default_rng(1).lognormal(np.log(300), 1.2, 1_500).astype(np.int64) % 70_000
    return write(tmp_path_factory.mktemp("long") / "p", lengths)


def thd_of(data, positions, texts, multiple, length):
    """The batch of Megatron Core, piece by piece."""
    found = {name: [] for name in ("tokens", "labels", "position_ids", "loss_mask", "padding_mask")}
    logical, padded, trained, longest = [0], [0], [0], 0

    def add(text, places):
        own = len(text) - 1
        rest = np.zeros(places - own, dtype=np.int64)
        found["tokens"].append(np.concatenate([text[:-1], rest]))
        found["labels"].append(np.concatenate([text[1:], rest]))
        found["loss_mask"].append(np.concatenate([np.ones(own), rest]).astype(np.float32))
        found["padding_mask"].append(np.arange(places) >= own)
        found["position_ids"].append(np.arange(places))
        logical.append(logical[-1] + own)
        padded.append(padded[-1] + places)
        trained.append(trained[-1] + own)

    for position in positions:
        room = length
        for piece in data.pieces(position):
            text = texts[piece.document][piece.start : piece.stop]
            places = -(-(len(text) - 1) // multiple) * multiple
            add(text, places)
            longest, room = max(longest, places), room - places
        if room:
            add(np.zeros(1, dtype=np.int64), room)
    batch = {name: torch.from_numpy(np.concatenate(parts))[None] for name, parts in found.items()}
    borders = {
        "cu_seqlens": logical,
        "cu_seqlens_padded": padded,
        "max_seqlen": [longest],
        "cu_trained_tokens": trained,
    }
    counts = {"num_trained_tokens": trained[-1:], "num_documents": [np.count_nonzero(np.diff(trained))]}
    batch |= {name: torch.tensor(values, dtype=torch.int32) for name, values in borders.items()}
    return batch | {name: torch.tensor(values) for name, values in counts.items()}


def slice_of(batch, rank, size):
    """TransformerEngine's rule for each local token: token t of segment d, whose local start is cu[d] / size, is at
    cu[d] + (L / 2) (r if i < L / 2 else 2 size - 2 - r) + i, of a segment's L local places, i of which are before t."""
    borders = batch["cu_seqlens_padded"].numpy().astype(np.int64)
    local = borders // size
    tokens = np.arange(local[-1])
    segment = np.searchsorted(local, tokens, side="right") - 1
    own, i = np.diff(local)[segment], tokens - local[segment]
    part = np.where(i < own // 2, rank, 2 * size - 2 - rank)
    places = torch.from_numpy(borders[segment] + own // 2 * part + i)
    return {name: one[:, places] if one.dim() == 2 else one for name, one in batch.items()}


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype, name
        assert torch.equal(found[name], one), name


@pytest.mark.parametrize(
    ("length", "most"), slow_but([(512, 40)], [(512, 40), (512, 1000), (4096, 1000), (32768, 1000)])
)
@pytest.mark.parametrize("multiple", [1, 16, 128])
def test_batches_and_their_slices_are_those_of_a_plain_reference(long_pair, length, most, multiple):
    data = packed(None, [long_pair], sizes=(most, 0, 0), sequence_length=length, pack_multiple=multiple)
    texts = [document.astype(np.int64) for document in IndexedDataset(long_pair)]
    order = (
        "tokens",
        "labels",
        "loss_mask",
        "position_ids",
        "padding_mask",
        "cu_seqlens",
        "cu_seqlens_padded",
        "max_seqlen",
        "cu_trained_tokens",
        "num_trained_tokens",
        "num_documents",
    )
    for number, batch in enumerate(BatchLoader(data, batch_size=4, layout="thd", rank=0, num_ranks=1)):
        wanted = thd_of(data, range(4 * number, 4 * number + 4), texts, multiple, length)
        same(batch, {name: wanted[name] for name in order})
        for size in (1, 2, 4, 8):
            if multiple % (2 * size) and size > 1:
                continue
            parts = [slice_for_context(batch, rank, size) for rank in range(size)]
            if size == 1 or number < 3:
                for rank, part in enumerate(parts):
                    same(part, {name: slice_of(wanted, rank, size)[name] for name in order})
            together = torch.cat([part["tokens"] for part in parts], dim=1)
            assert torch.equal(together.sort().values, batch["tokens"].sort().values)
    assert number == most // 4 - 1


def test_segments_that_a_context_does_not_fit_are_refused(long_pair):
    data = packed(None, [long_pair], sequence_length=512, pack_multiple=4)
    batch = next(iter(BatchLoader(data, batch_size=16, layout="thd", rank=0, num_ranks=1)))
    slice_for_context(batch, 0, 2)
    with pytest.raises(ArgumentError, match=r"segments must have a multiple of 8 places for 4 ranks.*pack_multiple=8"):
        slice_for_context(batch, 0, 4)


def test_padded_borders_are_as_many_in_each_batch(long_pair):
    data = packed(None, [long_pair], sequence_length=512)
    loader = BatchLoader(data, batch_size=4, layout="thd", pad_borders=True, rank=0, num_ranks=1)
    plain = BatchLoader(data, batch_size=4, layout="thd", rank=0, num_ranks=1)
    sizes = set()
    for batch, short in zip(loader, plain, strict=True):
        sizes.add(len(batch["cu_seqlens"]))
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            count = len(short[name])
            assert torch.equal(batch[name][:count], short[name])
            assert batch[name][count:].eq(short[name][-1]).all()
    assert len(sizes) == 1


def test_the_layouts_of_torch_and_of_megatron_bridge(long_pair):
    data = packed(None, [long_pair], sequence_length=512, pack_multiple=16)
    loaders = [BatchLoader(data, batch_size=1, layout=name, rank=0, num_ranks=1) for name in ("thd", "torch", "bridge")]
    has_padding = set()
    for thd, plain, bridge in zip(*loaders, strict=True):
        assert torch.equal(plain["cu_seq_q"], thd["cu_seqlens_padded"])
        assert plain["max_q"] == thd["cu_seqlens_padded"].diff().max()
        assert torch.equal(bridge["cu_seqlens_q"][0], thd["cu_seqlens"])
        assert bridge["max_seqlen_q"].tolist() == [thd["max_seqlen"].tolist()]
        has_padding.add("cu_seqlens_kv_padded" in bridge)
        if "cu_seqlens_kv_padded" in bridge:
            assert torch.equal(bridge["cu_seqlens_kv_padded"][0], thd["cu_seqlens_padded"])
        else:
            assert torch.equal(thd["cu_seqlens"], thd["cu_seqlens_padded"])
    assert has_padding == {False, True}
    with pytest.raises(ArgumentError, match="must have 1 pack, found 2"):
        next(iter(BatchLoader(data, batch_size=2, layout="bridge", rank=0, num_ranks=1)))


def test_layouts_need_packs(long_pair):
    data = packed(None, [long_pair], sequence_length=512)
    with pytest.raises(ArgumentError, match="layout must be one of 'thd', 'torch', 'bridge', found 'bshd'"):
        BatchLoader(data, batch_size=1, layout="bshd")
    stretches = packed(None, [long_pair], sequence_length=512, order="instant")
    with pytest.raises(ArgumentError, match="needs a dataset in the order 'packed', found 'instant'"):
        BatchLoader(stretches, batch_size=1, layout="thd")


def test_a_loader_of_packs_resumes_on_other_ranks(long_pair):
    data = packed(None, [long_pair], sizes=(64, 0, 0), sequence_length=512)
    whole = [batch["tokens"] for batch in BatchLoader(data, batch_size=8, layout="thd", rank=0, num_ranks=1)]
    first = BatchLoader(data, batch_size=8, layout="thd", rank=0, num_ranks=1)
    taken = [batch["tokens"] for _, batch in zip(range(3), first, strict=False)]
    state = first.state_dict()
    rest = [BatchLoader(data, batch_size=4, layout="thd", rank=rank, num_ranks=2) for rank in (0, 1)]
    for loader in rest:
        loader.load_state_dict(state)
    for step, parts in enumerate(zip(*rest, strict=True)):
        rows = sorted(row.tolist() for part in parts for row in part["tokens"].reshape(-1, 512))
        assert rows == sorted(row.tolist() for row in whole[len(taken) + step].reshape(-1, 512))
