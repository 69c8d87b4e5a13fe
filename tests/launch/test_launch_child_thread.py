"""The thread that children are started on."""

from __future__ import annotations

import threading

import pytest

from zstrat.launch._local import ChildThread


def test_calls_run_on_one_thread():
    thread, seen = ChildThread("zstrat test children"), []
    for _ in range(3):
        thread.call(lambda: seen.append(threading.current_thread()))
    thread.close()
    assert len(set(seen)) == 1
    assert seen[0] is not threading.current_thread()
    assert not seen[0].is_alive()


def test_errors_come_back_and_the_thread_goes_on():
    thread, seen = ChildThread("zstrat test children"), []

    def fail():
        raise OSError("no more processes")

    with pytest.raises(OSError, match="no more processes"):
        thread.call(fail)
    thread.call(lambda: seen.append(1))
    thread.close()
    assert seen == [1]
