"""Server socket of the rendezvous store, bound to a single interface."""

import errno
import ipaddress
import logging
import socket
from collections.abc import Mapping
from typing import Final

from trackbed.errors import CollectiveError

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
_ANY_PORT: Final = 9  # nothing is sent to it


def own_addresses(host: str, environment: Mapping[str, str]) -> list[str]:
    """Returns the addresses of this host at which other hosts can reach it, the best first.

    Many systems resolve their own name to a loopback address. The address is then the one from which this host reaches
    the host that launched the Slurm step.

    Args:
        host: name or address of this host.
        environment: environment variables; SLURM_LAUNCH_NODE_IPADDR is optional.

    >>> own_addresses("127.0.0.1", {}), own_addresses("192.0.2.7", {})
    (['127.0.0.1'], ['192.0.2.7'])
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CollectiveError(f"{host}: must be the name or an address of the host of rank 0, but: {error}") from None
    addresses = list(dict.fromkeys(str(place[4][0]) for place in found))
    launcher = environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if launcher and not _is_literal(host) and all(map(_is_loopback, addresses)):
        towards = _address_towards(launcher)
        addresses = addresses if towards is None else [towards]
    if not _is_literal(host) and all(map(_is_loopback, addresses)):
        logger.warning(
            "%s resolves to %s, which other hosts cannot reach: if there are any, set MASTER_ADDR to one that they can",
            host,
            addresses[0],
        )
    return addresses


def listen_at(addresses: list[str], port: int) -> socket.socket:
    """Opens a socket that listens at the first of these addresses that this host has.

    Args:
        addresses: at least one, IPv4 or IPv6.
        port: in `[0, 65536)`; 0 for any free port.
    """
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise CollectiveError(
                f"{address}:{port}: must be free for the ranks' store, but: {error.strerror}"
            ) from None
        return listener
    raise CollectiveError(
        f"{', '.join(addresses)}: must be an address of the host of rank 0, but is none: set MASTER_ADDR to one at "
        "which the other hosts reach it"
    )


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_towards(other: str) -> str | None:
    """Returns the address from which this host sends to `other`; None if there is none but loopback."""
    try:
        family = socket.AF_INET6 if ":" in other else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, _ANY_PORT))  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if _is_loopback(address) else address
