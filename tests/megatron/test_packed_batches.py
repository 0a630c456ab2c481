"""Megatron Core's parameters of packed sequences, from batches of packs."""

import subprocess
import sys
import textwrap

import pytest
import torch

from tests.datasets.test_packed import packed, write
from tests.support import ROOT
from trackbed import BatchLoader
from trackbed.errors import ArgumentError
from trackbed.loading import keys_for_stage, slice_for_context
from trackbed.megatron import packed_seq_params


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write(tmp_path_factory.mktemp("packs") / "p", [5, 30, 9, 64, 2, 17, 40, 12] * 4)


def batch_of(prefix, layout, **options):
    data = packed(None, [prefix], sequence_length=64, pack_multiple=4)
    return next(iter(BatchLoader(data, batch_size=options.pop("size", 2), layout=layout, rank=0, num_ranks=1)))


def check(found, batch):
    for end in ("q", "kv"):
        assert getattr(found, f"cu_seqlens_{end}") is batch["cu_seqlens"]
        assert getattr(found, f"cu_seqlens_{end}_padded") is batch["cu_seqlens_padded"]
        assert getattr(found, f"max_seqlen_{end}") == int(batch["max_seqlen"])
        assert type(getattr(found, f"max_seqlen_{end}")) is int
    assert found.qkv_format == "thd"
    assert getattr(found, "pad_between_seqs", True) is True
    assert getattr(found, "total_tokens", 128) == 128


def test_the_installed_release_takes_a_batch(prefix):
    kind = pytest.importorskip("megatron.core.packed_seq_params").PackedSeqParams
    batch = batch_of(prefix, "thd")
    found = packed_seq_params(batch)
    assert isinstance(found, kind)
    check(found, batch)
    assert not torch.equal(found.cu_seqlens_q, found.cu_seqlens_q_padded)
    check(packed_seq_params(slice_for_context(batch, 1, 2)), batch)
    middle = {name: one for name, one in batch.items() if name in keys_for_stage(1, 3)}
    assert "tokens" not in middle
    check(packed_seq_params(middle), batch)


LATER = """
from dataclasses import dataclass
from typing import Any

@dataclass
class PackedSeqParams:
    qkv_format: str = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: int = None
    max_seqlen_kv: int = None
    local_cp_size: int = None
    cp_group: Any = None
    total_tokens: int = None
    seq_idx: Any = None
    {field}
"""


@pytest.mark.parametrize("field", ["pad_between_seqs: bool = None", ""])
def test_a_later_release_has_its_fields(tmp_path, field):
    folder = tmp_path / "megatron" / "core"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "packed_seq_params.py").write_text(LATER.format(field=field))
    program = """
        import torch
        from trackbed.megatron import packed_seq_params
        borders = {"cu_seqlens": torch.tensor([0, 3, 3]), "cu_seqlens_padded": torch.tensor([0, 4, 8])}
        found = packed_seq_params({**borders, "max_seqlen": torch.tensor([4])})
        print(found.total_tokens, getattr(found, "pad_between_seqs", None), found.max_seqlen_kv)
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
    )
    assert said.stdout.split() == ["8", "True" if field else "None", "4"]


@pytest.mark.parametrize("layout", [None, "torch", "bridge"])
def test_other_layouts_are_refused(prefix, layout):
    with pytest.raises(ArgumentError, match="batch must be in the layout 'thd'"):
        packed_seq_params(batch_of(prefix, layout, size=1))
