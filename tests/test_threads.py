"""Threads of the house begin and end as those of Python."""

from __future__ import annotations

import threading

import pytest

from zstrat.threads import SteadyThread


@pytest.mark.parametrize("kind", [threading.Thread, SteadyThread])
def test_a_thread_that_is_started_twice_goes_on(kind):
    going = threading.Event()
    thread = kind(target=going.wait, name="once")
    thread.start()
    with pytest.raises(RuntimeError, match="threads can only be started once"):
        thread.start()
    assert thread.is_alive()
    going.set()
    thread.join(100)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="threads can only be started once"):
        thread.start()
    assert not thread.is_alive()
