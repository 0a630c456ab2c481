"""Record of a save: how long the program waited for it, and how it ended."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SaveRecord:
    """A save of one rank. Times are in seconds."""

    step: int
    num_bytes: int = 0
    """Bytes that this rank writes, without plain values and plain tensors beside them."""
    num_live_bytes: int = 0
    """Bytes, among these, that do not fit into `max_bytes`: `save` waited until they were written."""
    blocked_seconds: float = 0.0
    """Time for which `save` kept the program waiting."""
    total_seconds: float | None = None
    """Time from the call of `save` to the commit, or the failure; None until then."""
    error: str | None = None
    """Text of the failure; None for a save that is whole, or not over yet."""
    mirrored_seconds: float | None = None
    """Time of the copy to the mirror; None until it is whole."""
    mirror_error: str | None = None
    """Text of the failure of the last copy to the mirror; None if there is none."""
    phases: dict[str, float] = field(default_factory=dict)
    """Time of each phase, by its name."""
