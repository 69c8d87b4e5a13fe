"""Whether a cluster can have second copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.transport import key_names

if TYPE_CHECKING:
    from pathlib import Path


def check_replicas(replicas: int, ps: int, keys: Path | None) -> None:
    """
    Args:
        ps: How many parameter servers there are.
        keys: The folder of the keys, if there is one.

    Raises:
        ValueError: It cannot; says why.
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
