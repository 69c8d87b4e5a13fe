"""What SIGTERM and SIGHUP do to a program with servers: they drain, then it ends.

Nothing happens where the program has a handler of its own, or ignores a signal, or
makes its servers on another thread than its main one, as Python lets no other handle
signals: then the program decides.

A program whose main thread is in `Server.join` goes on behind it, as if its coordinator
had ended the servers. Any other ends by the signal, as it would have without servers.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


class Departure:
    """Takes the signals of a program that has servers.

    Args:
        ask: Asks all servers to end; returns at once.
        wait: Waits until all have ended, within their drain.
    """

    def __init__(self, ask: Callable[[str], None], wait: Callable[[], None]) -> None:
        self._ask, self._wait = ask, wait
        self._joins = 0

    def listen(self) -> None:
        """From now on, if nobody else does; may be repeated."""
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                if signal.getsignal(each) is signal.SIG_DFL:
                    signal.signal(each, self._told)

    def leave(self) -> None:
        """There are no servers any more: the signals are as they were."""
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                if signal.getsignal(each) == self._told:
                    signal.signal(each, signal.SIG_DFL)

    def __enter__(self) -> None:
        """The main thread waits for a server, and goes on once that has ended."""
        if threading.current_thread() is threading.main_thread():
            self._joins += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._joins -= 1

    def _told(self, number: int, frame: FrameType | None) -> None:
        self.leave()  # the second one ends the process at once
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # shell and terminal may both go
        self._ask(f"{signal.Signals(number).name} (once more ends at once)")
        if not self._joins:
            self._wait()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
