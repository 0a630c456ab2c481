"""The environments in which `make test-versions` runs the tests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """Versions to install; an empty one is the newest that pip finds."""

    name: str
    python: str
    torch: str
    numpy: str
    megatron_core: str | None
    """Release of megatron-core; None for tests without it."""
    others: tuple[str, ...] = ()
    """Further packages that these versions need in another release than `constraints.txt` has."""
    megatron_bridge: str | None = None
    """Release of megatron-bridge, installed without its dependencies; None for tests without it."""


ENVIRONMENTS = (
    Environment("3.11", "3.11", torch="2.13.0", numpy="2.4.6", megatron_core="0.16.1"),
    Environment("3.12-oldest", "3.12", torch="2.9.1", numpy="1.26.4", megatron_core=None, others=("pyarrow==19.0.1",)),
    Environment("3.12-newest", "3.12", torch="", numpy="", megatron_core="0.19.2", megatron_bridge="0.6.2"),
    Environment("3.13", "3.13", torch="2.13.0", numpy="2.4.6", megatron_core=None),
    Environment("3.14", "3.14", torch="", numpy="", megatron_core=None),
)
