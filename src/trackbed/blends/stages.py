"""Reader of `[[stage]]`: the weights from a given sample on."""

from typing import Any, Final

from trackbed.blends.blend_file import DatasetEntry, StageEntry
from trackbed.blends.counts import parse_count
from trackbed.blends.sizes import samples_for
from trackbed.blends.toml_tables import COUNT, NUMBER, TABLE, WHOLE, TableReader
from trackbed.index.splits import Split

__all__ = ["read_stages"]

_STARTS: Final = ("from_sample", "from_token", "from_iteration")


def read_stages(
    reader: TableReader,
    datasets: tuple[DatasetEntry, ...],
    *,
    order: str,
    sequence_length: int,
    global_batch_size: int | None,
) -> tuple[StageEntry, ...]:
    """Reads every `[[stage]]` of a file; none may start before the previous one."""
    names = [entry.name for entry in datasets if entry.splits is None or Split.train in entry.splits]
    found: list[StageEntry] = []
    tables = reader.tables("stage")
    if tables and order != "instant":
        reader.refuse("stage", f"needs order = 'instant', found {order!r}")
    for table in tables:
        start = _first_sample(table, sequence_length, global_batch_size)
        stage = StageEntry(first_sample=start, weights=_weights(table, names), where=table.where)
        if found and start < found[-1].first_sample:
            before = found[-1].first_sample
            table.refuse(table.given(*_STARTS)[0], f"must not decrease, found sample {start} after {before}")
        found.append(stage)
        table.refuse_unknown()
    return tuple(found)


def _first_sample(table: TableReader, sequence_length: int, global_batch_size: int | None) -> int:
    values = {key: table.take(key, COUNT if key == "from_token" else WHOLE) for key in _STARTS}
    given = table.given(*_STARTS)
    if len(given) != 1:
        found = " and ".join(given) or "none"
        table.refuse(
            given[-1] if given else "from_sample", f"must be the only one of {', '.join(_STARTS)}, found {found}"
        )
        return 0
    value: Any = values[given[0]]
    if value is None:
        return 0
    if given[0] == "from_token":
        return samples_for(parse_count(value) if isinstance(value, str) else value, sequence_length)
    if given[0] == "from_iteration" and global_batch_size is None:
        table.refuse("from_iteration", "needs size.global_batch_size, found none")
    return int(value) * (global_batch_size or 1 if given[0] == "from_iteration" else 1)


def _weights(table: TableReader, names: list[str]) -> tuple[tuple[str, float], ...]:
    table.need("weights", TABLE, {})
    inner = table.table("weights")
    weights = [(name, inner.take(name, NUMBER)) for name in names]
    if inner.keys and not any(weight for _, weight in weights):
        table.refuse("weights", "must be above 0 for at least one dataset, found 0 for all")
    inner.refuse_unknown()
    return tuple((name, float(weight)) for name, weight in weights if weight is not None)
