"""For how long ranks have given no sign of life. Pure."""

from collections.abc import Mapping, Sequence

__all__ = ["Silence"]


class Silence:
    """How long each rank has been silent, as seen by an observer that looks again and again.

    A rank is silent while the number of its signs of life does not rise: an old record that somebody puts back is no
    sign. Only time in which the observer looked counts: a machine that was suspended, and everybody on it with it,
    wakes up as if no time had passed.

    Args:
        usual_gap: seconds between two looks; of a longer gap, twice as much counts.
    """

    def __init__(self, usual_gap: float) -> None:
        self._usual_gap = usual_gap
        self._seconds = 0.0
        self._most_signs: dict[int, int] = {}
        self._since: dict[int, float] = {}

    def look(self, signs: Mapping[int, int], gap: float) -> None:
        """Record one look.

        Args:
            signs: how many signs of life each rank has given, 0 if none yet.
            gap: seconds since the last look, or since waiting began.
        """
        self._seconds += min(gap, 2 * self._usual_gap)
        for rank, count in signs.items():
            if rank not in self._most_signs or count > self._most_signs[rank]:
                self._since[rank] = self._seconds
                self._most_signs[rank] = count

    def silent_for(self, seconds: float, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that have been silent for at least `seconds`."""
        return [rank for rank in ranks if self._seconds - self._since[rank] >= seconds]
