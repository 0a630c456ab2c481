"""Sums of the counts in the seals of all shards, and the report of them."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trackbed.errors import FormatError
from trackbed.preprocess.find_inputs import names_by_reason
from trackbed.preprocess.inputs import Inputs
from trackbed.preprocess.report import BAD_SHOWN, Output, Report
from trackbed.preprocess.shards.partition import ShardPlan
from trackbed.preprocess.shards.spec import ShardSpec
from trackbed.tokens.seal import Seal


class Totals:
    """Running sums over shards, added in any order. Holds a few bytes for each shard.

    Args:
        inputs: all input files.
        spec: values that all shards have in common.
        plan: the shards.
    """

    def __init__(self, inputs: Inputs, spec: ShardSpec, plan: ShardPlan) -> None:
        stem = f"{spec.output}-*-of-{spec.num_shards:05}"
        self._outputs = [Output(key, f"{stem}_{key}_{spec.level}", 0, 0, 0, 0, 0) for key in spec.json_keys]
        self._inputs = inputs
        self._plan = plan
        self._records = self._blank = self._bad = 0
        self._text_bytes: int | None = 0
        self._lines = np.zeros(len(plan), dtype=np.int64)  # of the last file of each shard
        self._first_bad: list[tuple[int, int, list[Any]]] = []  # with shard and number, in order
        self.done_bytes = 0

    def add(self, shard: int, seals: Sequence[Seal]) -> None:
        """Adds the counts of a finished shard.

        Raises:
            FormatError: the counts in a seal are damaged.
        """
        try:
            for key, seal in enumerate(seals):
                self._add_pair(key, seal)
            counts = seals[0].counts or {}
            self._text_bytes = _plus(self._text_bytes, counts.get("text_bytes"))
            self._records += int(counts["records"])
            self._blank += int(counts["blank"])
            self._bad += int(counts["bad"])
            self._lines[shard] = counts["lines"]
            for number, (path, line, is_relative, reason) in enumerate(counts["first_bad"]):
                insort(self._first_bad, (shard, number, [str(path), int(line), bool(is_relative), str(reason)]))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise FormatError(
                f"shard {shard}: its seal must have the counts of docs/formats/indexed.md, found {error!r}"
            ) from error
        del self._first_bad[BAD_SHOWN:]
        self.done_bytes += self._plan.size_bytes(shard)

    def report(self) -> Report:
        """Returns the report, after all shards were added."""
        return Report(
            outputs=tuple(self._outputs),
            files=len(self._inputs.files),
            input_bytes=self._plan.total_bytes,
            records=self._records,
            blank=self._blank,
            bad=self._bad,
            first_bad=tuple(self._describe(shard, *bad) for shard, _, bad in self._first_bad),
            left_out_files=self._inputs.left_out,
            formats=self._inputs.names_by_format(),
            left_out=names_by_reason(self._inputs.skipped),
            shards=len(self._plan),
            text_bytes=self._text_bytes if any(file.is_packed for file in self._inputs.files) else None,
        )

    def _add_pair(self, key: int, seal: Seal) -> None:
        output, counts = self._outputs[key], seal.counts or {}
        self._outputs[key] = replace(
            output,
            documents=output.documents + seal.documents,
            sequences=output.sequences + seal.sequences,
            tokens=output.tokens + seal.bin.size_bytes // np.dtype(seal.dtype).itemsize,
            dropped=output.dropped + int(counts["dropped"]),
            empty=output.empty + int(counts.get("empty", 0)),
            unknown=_plus(output.unknown, counts.get("unknown")),
            trained=None if "trained" not in counts else (output.trained or 0) + int(counts["trained"]),
            untrained=output.untrained + int(counts.get("untrained", 0)),
            open_turns=output.open_turns + int(counts.get("open_turns", 0)),
        )

    def _describe(self, shard: int, path: str, line: int, is_relative: bool, reason: str) -> str:  # noqa: FBT001  JSON
        """Returns location and fault of a bad record; its line is counted from the beginning of its file."""
        before = 0
        if is_relative:
            file = self._plan.ranges(shard)[0].file
            first = int(self._plan.starts[file]) // self._plan.shard_bytes
            before = int(self._lines[first:shard].sum())
        return f"{path}:{before + line + 1}: {reason}"


def _plus(total: int | None, found: Any) -> int | None:
    """Returns the sum of a count over shards; None if a seal lacks it."""
    return None if total is None or found is None else total + int(found)
