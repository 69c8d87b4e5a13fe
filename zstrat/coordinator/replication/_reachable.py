"""Where a copy is reached that says where it listens."""

from __future__ import annotations

import ipaddress

from zstrat.transport import parse


def reachable(hosted: str, process: str) -> str:
    """The address of a copy.

    Args:
        hosted: What its process says: a port of an interface, or of all of them.
        process: How this program, and the workers, reach that process.
    """
    where, known = parse(hosted), parse(process)
    if where.scheme != "tcp" or known.scheme != "tcp" or not _is_any(where.host):
        return hosted
    return known._replace(port=where.port).endpoint


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name, or "*"
        return host == "*"
