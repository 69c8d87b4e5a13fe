"""Ranks in one process that pretend to be on several hosts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

from collectives_groups import ranks_of

from zstrat.collectives.group import _runtime as runtimes


@contextmanager
def ranks_on(hosts, monkeypatch):
    """As `ranks_of`, one for each letter of ``hosts``, which names its host."""
    real = runtimes.hello
    monkeypatch.setattr(
        runtimes,
        "hello",
        lambda job, index, incarnation: replace(
            real(job, index, incarnation), host=f"host-{hosts[index]}"
        ),
    )
    with ranks_of(len(hosts)) as ranks:
        yield ranks
