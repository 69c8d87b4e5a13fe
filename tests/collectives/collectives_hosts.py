"""Ranks in one process that pretend to be on several hosts."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

from collectives_groups import ranks_of


@contextmanager
def ranks_on(hosts, monkeypatch, **options):
    """As `ranks_of`, one for each letter of ``hosts``, which names its host."""

    def name_of_host():
        """Each rank asks on the thread of its node, which ends with its number."""
        rank = threading.current_thread().name.rpartition(":")[2]
        return f"host-{hosts[int(rank)]}"

    monkeypatch.setattr(socket, "gethostname", name_of_host)
    with ranks_of(len(hosts), **options) as ranks:
        yield ranks
