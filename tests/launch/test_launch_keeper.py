"""The thread that children are started on."""

from __future__ import annotations

import threading

import pytest

from zstrat.launch._local import ChildThread


def test_calls_run_on_one_thread():
    keeper, seen = ChildThread("zstrat test keeper"), []
    for _ in range(3):
        keeper.call(lambda: seen.append(threading.current_thread()))
    keeper.close()
    assert len(set(seen)) == 1
    assert seen[0] is not threading.current_thread()
    assert not seen[0].is_alive()


def test_errors_come_back_and_the_thread_goes_on():
    keeper, seen = ChildThread("zstrat test keeper"), []

    def fail():
        raise OSError("no more processes")

    with pytest.raises(OSError, match="no more processes"):
        keeper.call(fail)
    keeper.call(lambda: seen.append(1))
    keeper.close()
    assert seen == [1]
