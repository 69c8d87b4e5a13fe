"""Ranks in one process that pretend to be on several hosts."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager

from collectives_groups import ranks_of


@contextmanager
def ranks_on(hosts, monkeypatch, *, elsewhere=(), **options):
    """As `ranks_of`, one for each letter of ``hosts``, which names its host.

    ``elsewhere``: ranks on another machine than the others whose host has their name.
    """
    real = os.getpid

    def number():
        """Of the rank, which asks on the thread of its node."""
        return threading.current_thread().name.rpartition(":")[2]

    def process_id():
        return 1 if number() in map(str, elsewhere) else real()

    monkeypatch.setattr(os, "getpid", process_id)

    def name_of_host():
        return f"host-{hosts[int(number())]}"

    monkeypatch.setattr(socket, "gethostname", name_of_host)
    with ranks_of(len(hosts), **options) as ranks:
        yield ranks
