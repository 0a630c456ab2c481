"""Exchange of tensors that several ranks want: one rank reads each part, and sends it to the others in flat buffers."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trackbed.checkpoint.io.box_parts import cut_box
from trackbed.checkpoint.io.boxes import BoxToFill
from trackbed.checkpoint.plan.assignment import group_copies
from trackbed.checkpoint.plan.shard_table import DTYPES, Table
from trackbed.checkpoint.ranks import Meeting
from trackbed.comm.torch_group import device_for
from trackbed.errors import ArgumentError
from trackbed.files import boot_id
from trackbed.kernels import assign_least_loaded

Exchange = Literal["auto", "none", "flat"]
"""Way of tensors that several ranks want: each rank reads for itself ("none"), or one reads and sends ("flat").

"auto" is "none" for files where all ranks are on one host, which reads each byte once, and "flat" otherwise.
"""
Int64s = npt.NDArray[np.int64]
Numbers = tuple[int, ...]

_MIN_PART_BYTES: Final = 4 << 20
_MAX_PART_BYTES: Final = 16 << 20
"""Bytes of a part among few ranks: both ends of a part are read to the next whole MiB, so large parts read less."""
_ROUND_BYTES: Final = 64 << 20
"""Bytes that a rank sends, and that it receives, in one collective, unless one part has more. The ranks meet before
each; a rank has up to three times as much memory for it."""
_ALIGNMENT: Final = 16

_on_one_host: Final[WeakKeyDictionary[Any, bool]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class SharedBox:
    """Box of a tensor that several ranks want and one reads."""

    rows: Int64s
    """Rows of the shards that have it, in the table of all ranks."""
    reader: int
    """Rank that reads it; one of the ranks that want it."""
    first: Numbers
    """First element in the tensor."""
    shape: Numbers
    num_bytes: int


def parse_exchange(exchange: Any) -> Exchange:
    """Returns a name of a way.

    Raises:
        ArgumentError: it is none.
    """
    names: tuple[Exchange, ...] = get_args(Exchange)
    if exchange not in names:
        raise ArgumentError(f"exchange: must be one of {', '.join(map(repr, names))}, found {exchange!r}")
    return names[names.index(exchange)]


def must_exchange(meeting: Meeting, exchange: Exchange, *, is_stored: bool) -> bool:
    """Collective over the ranks, the first time: True if ranks are to send each other what they read.

    Args:
        meeting: the ranks.
        exchange: the way.
        is_stored: True for what lies in an object store, of which a host keeps nothing that it has read.
    """
    parse_exchange(exchange)
    if exchange == "none" or meeting.size == 1:
        return False
    if meeting.process_group is None:
        if exchange == "auto":
            return False
        raise ArgumentError(
            "exchange: must be 'none' or 'auto' for ranks without a process group of torch, found 'flat'"
        )
    if exchange == "flat" or is_stored:
        return True
    if meeting.group not in _on_one_host:
        hosts = meeting.group.all_gather(boot_id())
        _on_one_host[meeting.group] = bool(hosts[0]) and all(host == hosts[0] for host in hosts)
    return not _on_one_host[meeting.group]


def plan_parts(table: Table, num_ranks: int) -> list[SharedBox]:
    """Divides what several ranks want into parts, and chooses who reads each, so that all read as much.

    Args:
        table: wanted tensors of all ranks, with the stored types.
        num_ranks: number of ranks.
    """
    rows, starts = group_copies(table, np.flatnonzero((table.shape > 0).all(axis=1)))
    boxes: list[tuple[int, int, Numbers, Numbers, int]] = []
    most_bytes = min(max(_MIN_PART_BYTES, _ROUND_BYTES // num_ranks), _MAX_PART_BYTES)
    for start, end in itertools.pairwise([*starts.tolist(), len(rows)]):
        row = int(rows[start])
        if (table.rank[rows[start:end]] == table.rank[row]).all():
            continue
        axes = int(table.num_axes[row])
        box = tuple(table.offset[row, :axes].tolist()), tuple(table.shape[row, :axes].tolist())
        itemsize = DTYPES[table.dtype[row]].itemsize
        boxes += [
            (start, end, first, shape, prod(shape) * itemsize) for first, shape in cut_box(*box, itemsize, most_bytes)
        ]
    bounds = np.array([part[:2] for part in boxes], dtype=np.int64).reshape(-1, 2)
    costs = np.array([part[-1] for part in boxes], dtype=np.int64)
    places = assign_least_loaded(costs, bounds[:, 0], bounds[:, 1], table.rank[rows], num_ranks)
    readers = table.rank[rows[places]].tolist()
    return [
        SharedBox(rows[start:end], reader, first, shape, num_bytes)
        for reader, (start, end, first, shape, num_bytes) in zip(readers, boxes, strict=True)
    ]


def exchange_parts(
    meeting: Meeting,
    table: Table,
    parts: Sequence[SharedBox],
    targets: Callable[[int], torch.Tensor],
    read: Callable[[list[BoxToFill]], None],
) -> None:
    """Collective over the ranks: reads the parts, and fills the tensors of all ranks that want them.

    Args:
        meeting: the ranks.
        table: wanted tensors of all ranks.
        parts: result of `plan_parts`.
        targets: returns the tensor of a row of this rank.
        read: fills tensors from places of stored tensors.
    """
    for some in _rounds(table, parts, meeting.size):
        sent: list[list[torch.Tensor]] = [[] for _ in range(meeting.size)]
        awaited: list[list[SharedBox]] = [[] for _ in range(meeting.size)]
        own = [part for part in some if part.reader == meeting.rank]
        raws = [torch.zeros(_padded(part.num_bytes), dtype=torch.uint8, device="cpu") for part in own]
        boxes = [_box_in(raw, table, part) for raw, part in zip(raws, own, strict=True)]
        keys = [table.keys[table.key[part.rows[0]]] for part in own]
        read([BoxToFill(key, box, part.first) for key, box, part in zip(keys, boxes, own, strict=True)])
        for part, raw, box in zip(own, raws, boxes, strict=True):
            _fill(meeting.rank, table, part, box, targets)
            for holder in _holders(table, part) - {meeting.rank}:
                sent[holder].append(raw)
        for part in some:
            if part.reader != meeting.rank and meeting.rank in _holders(table, part):
                awaited[part.reader].append(part)
        received = _all_to_all(meeting, sent, [sum(_padded(part.num_bytes) for part in found) for found in awaited])
        place = 0
        for part in (part for found in awaited for part in found):
            size = _padded(part.num_bytes)
            _fill(meeting.rank, table, part, _box_in(received[place : place + size], table, part), targets)
            place += size


def _holders(table: Table, part: SharedBox) -> set[int]:
    """Ranks that want a part."""
    return set(table.rank[part.rows].tolist())


def _rounds(table: Table, parts: Sequence[SharedBox], num_ranks: int) -> Iterator[list[SharedBox]]:
    """Yields parts that are exchanged in one collective."""
    sent, received = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    some: list[SharedBox] = []
    for part in parts:
        holders = np.unique(table.rank[part.rows])
        size = _padded(part.num_bytes)
        sent[part.reader] += size * (len(holders) - 1)
        received[holders[holders != part.reader]] += size
        if some and max(sent.max(), received.max()) > _ROUND_BYTES:
            yield some
            some = []
            sent[:], received[:] = 0, 0
            sent[part.reader] += size * (len(holders) - 1)
            received[holders[holders != part.reader]] += size
        some.append(part)
    if some:
        yield some


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _box_in(raw: torch.Tensor, table: Table, part: SharedBox) -> torch.Tensor:
    """Bytes of a part as a tensor."""
    return raw[: part.num_bytes].view(DTYPES[table.dtype[part.rows[0]]]).view(part.shape)


def _fill(rank: int, table: Table, part: SharedBox, box: torch.Tensor, targets: Callable[[int], torch.Tensor]) -> None:
    """Copies a part to the tensors of this rank that have it."""
    for row in part.rows[table.rank[part.rows] == rank].tolist():
        offset = table.offset[row].tolist()
        place = tuple(
            slice(low - start, low - start + size)
            for low, size, start in zip(part.first, part.shape, offset, strict=False)
        )
        targets(row)[place].copy_(box)


def _all_to_all(meeting: Meeting, sent: list[list[torch.Tensor]], num_received: list[int]) -> torch.Tensor:
    """Collective over the ranks: sends bytes to each, and returns those from all, in rank order."""
    group = meeting.process_group
    device = device_for(group)
    tensors = [tensor for found in sent for tensor in found]
    flat = torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.uint8, device="cpu")
    received = torch.empty(sum(num_received), dtype=torch.uint8, device=device)
    num_sent = [sum(map(len, found)) for found in sent]
    meeting.group.barrier()
    work = dist.all_to_all_single(received, flat.to(device), num_received, num_sent, group=group, async_op=True)
    meeting.wait(work)
    return received.cpu()
