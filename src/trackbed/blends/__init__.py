"""Blend files: datasets, weights, sizes and stages in TOML, and their plan (docs/formats/blend-file.md)."""

from trackbed.blends.blend_file import BlendFile, DatasetEntry, SizeEntry, StageEntry, TokenizerEntry
from trackbed.blends.draws import StageDraws
from trackbed.blends.measure import MeasuredBlend, measure_blend
from trackbed.blends.members import Member
from trackbed.blends.plan import BlendPlan, DatasetPlan, SplitPlan, plan_blend
from trackbed.blends.read import read_blend_file, read_blend_table, with_tokenizer
from trackbed.blends.sizes import samples_for
from trackbed.blends.tokenizer import StatedTokenizer
from trackbed.blends.toml_tables import parse_count

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
