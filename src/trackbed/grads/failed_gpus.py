"""Operations on a GPU that never end, because another rank has failed: they are ended, and free whoever waits for them.

An operation of NCCL that waits for a rank that has failed keeps its GPU, and a thread that waits for the GPU, such as
one in `loss.item()`, cannot look at the other ranks.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from trackbed.comm import Group
from trackbed.comm.step import Stopped
from trackbed.comm.store import StoreUnreachable
from trackbed.errors import CollectiveError
from trackbed.grads.collectives import TorchCollectives

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.05
_GRACE_SECONDS: Final = 1.0
"""Time for operations that all ranks have issued to end, and for a thread that waits for no GPU to leave."""


def end_stuck(on_gpus: Sequence[TorchCollectives], seconds: float = _GRACE_SECONDS) -> None:
    """Ends operations that this rank has issued, after a failure, if they do not end by themselves in some seconds."""
    for collectives in on_gpus:
        if not collectives.is_ended and collectives.end_stuck(seconds):
            logger.warning(
                "rank %d: operations of its process group were ended, because they waited for a rank that has failed; "
                "what needs no other rank, such as torch.save(), still works",
                collectives.rank(),
            )


@contextlib.contextmanager
def freed_from_failures(on_gpus: Sequence[TorchCollectives], check: Callable[[], None], group: Group) -> Iterator[None]:
    """In the block, a failure of another rank frees a thread that waits for a GPU.

    Args:
        on_gpus: collectives whose operations are queued on a GPU; without any, nothing is done.
        check: raises if another rank has failed. Makes no request.
        group: the ranks, which say whose process has ended.
    """
    if not on_gpus or group.size == 1:
        yield
        return
    is_over = threading.Event()

    def has_failed() -> bool:
        try:
            check()
        except (Stopped, CollectiveError, StoreUnreachable):
            return True
        ended_ranks = getattr(group, "ended_ranks", None)
        return ended_ranks is not None and ended_ranks() is not None

    def watch() -> None:
        while not is_over.wait(_POLL_SECONDS):
            if has_failed():
                # The thread of the program leaves by itself, unless it waits for a GPU.
                if not is_over.wait(_GRACE_SECONDS):
                    end_stuck(on_gpus, 0.0)
                return

    thread = threading.Thread(target=watch, name="trackbed-failures", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
