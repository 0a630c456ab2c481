"""For how long ranks have given no sign of life. Pure."""

from collections.abc import Mapping, Sequence

__all__ = ["Silence"]


class Silence:
    """What somebody who looks at the ranks again and again knows of them.

    A rank is silent while what it has written stays the same. Only time in which somebody looked counts: a machine
    that was suspended, and everybody on it with it, wakes up as if no time had passed.

    Args:
        usual_gap: seconds between two looks; of a longer gap, twice as much counts.
    """

    def __init__(self, usual_gap: float) -> None:
        self._usual_gap = usual_gap
        self._seconds = 0.0
        self._written: dict[int, bytes | None] = {}
        self._since: dict[int, float] = {}

    def look(self, written: Mapping[int, bytes | None], gap: float) -> None:
        """Take in what ranks have written.

        Args:
            written: what each rank has written, None if nothing yet.
            gap: seconds since the last look, or since waiting began.
        """
        self._seconds += min(gap, 2 * self._usual_gap)
        for rank, value in written.items():
            if rank not in self._written or self._written[rank] != value:
                self._since[rank] = self._seconds
            self._written[rank] = value

    def silent_for(self, seconds: float, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that have been silent for at least `seconds`."""
        return [rank for rank in ranks if self._seconds - self._since[rank] >= seconds]
