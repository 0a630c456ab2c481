"""Comparison of the copies of a tensor that lies on several meshes, such as a weight that two stages of a pipeline use.

The copies on one mesh are the same by their placement, and are not compared.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import orjson

from trackbed.checkpoint.plan.divided_plan import DividedPlan
from trackbed.checkpoint.ranks import Meeting
from trackbed.checkpoint.state.divided_tensors import DividedTensor, view_of
from trackbed.comm.tensor_digest import tensor_digest
from trackbed.errors import CheckpointError

_Digests = Mapping[str, Sequence[tuple[list[int], list[int], int]]]
_ADVICE: Final = "give one of them a key of its own, or the same values and placements"


def check_copies_agree(meeting: Meeting, entries: Iterable[DividedTensor], plan: DividedPlan) -> None:
    """Collective over the ranks, if a tensor lies on several meshes: checks that its values are the same on all.

    Args:
        meeting: the ranks.
        entries: tensors of this rank.
        plan: plan of the save.

    Raises:
        CheckpointError: they differ, or the meshes divide it differently.
    """
    if not plan.on_several_meshes:
        return
    own = {entry.key: digests_of(entry, meeting.poll) for entry in entries if entry.key in plan.on_several_meshes}
    of_ranks = [orjson.loads(content) for content in meeting.gather(orjson.dumps(own))]
    for key, divisions in plan.on_several_meshes.items():
        _check_same(key, of_ranks, divisions[0].ranks)


def digests_of(entry: DividedTensor, poll: Callable[[], None]) -> list[tuple[list[int], list[int], int]]:
    """First element, shape and digest of each box of a rank."""
    return [
        (list(box.offset), list(box.shape), tensor_digest(view_of(entry.data, box).contiguous(), poll))
        for box in entry.boxes
        if 0 not in box.shape
    ]


def _check_same(key: str, of_ranks: Sequence[_Digests], first_mesh: Sequence[int]) -> None:
    saved = {}
    for rank in first_mesh:
        for offset, shape, digest in of_ranks[rank].get(key, ()):
            saved[tuple(offset), tuple(shape)] = rank, digest
    for rank, digests in enumerate(of_ranks):
        for offset, shape, digest in digests.get(key, ()):
            place = ", ".join(f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True))
            if (tuple(offset), tuple(shape)) not in saved:
                raise CheckpointError(
                    f"{key}: both meshes on which it lies must divide it alike, but rank {rank} alone has [{place}]: "
                    f"{_ADVICE}"
                )
            other, wanted = saved[tuple(offset), tuple(shape)]
            if digest != wanted:
                raise CheckpointError(
                    f"{key}: the values on both meshes on which it lies must be the same, but those of rank {other} "
                    f"and rank {rank} differ in [{place}]: {_ADVICE}"
                )
