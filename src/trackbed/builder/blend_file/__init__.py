"""Blend files: datasets, weights, sizes and stages in TOML, and their plan (docs/formats/blend-file.md)."""

from trackbed.builder.blend_file.counts import parse_count
from trackbed.builder.blend_file.description import BlendFile, DatasetEntry, SizeEntry, StageEntry, TokenizerEntry
from trackbed.builder.blend_file.draws import StageDraws
from trackbed.builder.blend_file.measure import MeasuredBlend, measure_blend
from trackbed.builder.blend_file.members import Member
from trackbed.builder.blend_file.plan import BlendPlan, DatasetPlan, SplitPlan, plan_blend
from trackbed.builder.blend_file.read import read_blend_file, read_blend_table, with_tokenizer
from trackbed.builder.blend_file.sizes import samples_for
from trackbed.builder.blend_file.tokenizer import StatedTokenizer

__all__ = [
    "BlendFile",
    "BlendPlan",
    "DatasetEntry",
    "DatasetPlan",
    "MeasuredBlend",
    "Member",
    "SizeEntry",
    "SplitPlan",
    "StageDraws",
    "StageEntry",
    "StatedTokenizer",
    "TokenizerEntry",
    "measure_blend",
    "parse_count",
    "plan_blend",
    "read_blend_file",
    "read_blend_table",
    "samples_for",
    "with_tokenizer",
]
