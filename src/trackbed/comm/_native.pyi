from collections.abc import Callable

import numpy as np
import numpy.typing as npt

COUNTER_WORDS: int

def set_counter(words: npt.NDArray[np.uint32], index: int, count: int, /) -> None: ...
def wait_for_counters(
    words: npt.NDArray[np.uint32],
    first: int,
    number: int,
    count: int,
    poll: Callable[[int], object] | None,
    /,
) -> None: ...
