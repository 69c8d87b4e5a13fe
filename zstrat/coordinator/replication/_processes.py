"""What is to be known of processes that are to keep copies for each other.

Whether there can be copies at all is asked before a program connects; where one is
reached, when its process has said where that listens.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from zstrat.transport import key_names, parse

if TYPE_CHECKING:
    from pathlib import Path


def check_replicas(replicas: int, ps: int, keys: Path | None) -> None:
    """
    Args:
        ps: How many parameter servers there are.
        keys: The folder of the keys, if there is one.

    Raises:
        ValueError: There cannot be so many copies; says why.
    """
    if not replicas:
        return
    if ps <= replicas:
        raise ValueError(
            f"replicas={replicas}: what one parameter server holds is kept by another "
            f"one, too, and the cluster has {ps}: give it {replicas + 1} ps at least"
        )
    if keys is not None and any(name.startswith("ps-") for name in key_names(keys)):
        raise ValueError(
            f"replicas={replicas}: the copy of one parameter server has the key of "
            f"another one, and {keys} has a key for each: make keys for the roles, "
            "`zstrat keygen` without --per-task"
        )


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
