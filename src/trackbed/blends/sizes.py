"""Sizes of the splits: in samples, in tokens, or by the arguments of a Megatron job."""

from typing import Final

from trackbed.blends.blend_file import SizeEntry
from trackbed.blends.toml_tables import COUNT, WHOLE, WHOLE_POSITIVE, TableReader, parse_count
from trackbed.index.splits import Split

SIZE_KEYS: Final = {
    Split.train: ("train", "train_tokens", "train_iters"),
    Split.valid: ("valid", "eval_iters"),
    Split.test: ("test", "eval_iters"),
}
"""Keys that give the size of a split."""
_EVALUATION: Final = ("eval_interval", "eval_iters")
SizesAndBatch = tuple[SizeEntry, int | None]
"""Sizes, and the global batch size if given."""


def samples_for(tokens: int, sequence_length: int) -> int:
    """Returns the minimum number of samples that hold `tokens` tokens.

    >>> samples_for(100, 8)
    13
    """
    return -(-tokens // sequence_length)


def read_sizes(table: TableReader, *, sequence_length: int) -> SizesAndBatch:
    """Reads `[size]`."""
    numbers = {key: table.take(key, WHOLE) for key in ("train", "valid", "test")}
    tokens = table.take("train_tokens", COUNT)
    job = {key: table.take(key, WHOLE_POSITIVE) for key in ("train_iters", "global_batch_size", "eval_interval")}
    job["eval_iters"] = table.take("eval_iters", WHOLE)
    _check_keys(table)
    train = numbers["train"]
    if tokens is not None:
        train = samples_for(parse_count(tokens) if isinstance(tokens, str) else tokens, sequence_length)
    if job["train_iters"] is not None and job["global_batch_size"] is not None:
        train = job["train_iters"] * job["global_batch_size"]
    valid, test = _evaluation_sizes(job, train)
    table.refuse_unknown()
    return (
        SizeEntry(
            train=train,
            valid=numbers["valid"] if numbers["valid"] is not None else valid,
            test=numbers["test"] if numbers["test"] is not None else test,
        ),
        job["global_batch_size"],
    )


def _evaluation_sizes(job: dict[str, int | None], train: int | None) -> tuple[int | None, int | None]:
    """Returns the samples of validation and test, by the rule of Megatron-LM's training loop."""
    batch, interval, iterations = job["global_batch_size"], job["eval_interval"], job["eval_iters"]
    if batch is None or iterations is None:
        return None, None
    steps = job["train_iters"] if job["train_iters"] is not None else (train or 0) // batch
    valid = None if interval is None else (steps // interval + 1) * iterations * batch
    return valid, iterations * batch


def _check_keys(table: TableReader) -> None:
    for key in table.given(*SIZE_KEYS[Split.train])[1:]:
        table.refuse(key, f"must be the only size of training, found {table.given(*SIZE_KEYS[Split.train])[0]} too")
    for key in table.given("train_iters", *_EVALUATION):
        if not table.given("global_batch_size"):
            table.refuse(key, "needs size.global_batch_size, found none")
    for key, other in (_EVALUATION, _EVALUATION[::-1]):
        if table.given(key) and not table.given(other):
            table.refuse(key, f"needs size.{other}, found none")
    for split in (Split.valid, Split.test):
        if table.given(split.name) and table.given("eval_iters"):
            table.refuse(split.name, f"must be omitted if eval_iters gives the size of {split.name}, found both")
