"""Handlers of signals that a forked process does not keep.

A process that a program forks, as a `multiprocessing.Pool` does, inherits the handlers
of the program and the descriptor that wakes its event loop. With these no SIGTERM ends
the child, and each one reaches the parent, which takes it for its own.

Law: what handles signals in zstrat sets its handlers here. A forked process has the
handlers that stood before ours, and wakes nobody.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio
    from types import FrameType

Handler = Callable[[int, "FrameType | None"], Any] | int | None
"""What `signal.signal` takes; None stands for a handler that Python did not set."""


@dataclass
class HandledSignal:
    """What handled a signal ``before`` zstrat did, and the handlers of ours since."""

    before: Handler
    ours: list[Handler] = field(default_factory=list)


_handled: Final[dict[signal.Signals, HandledSignal]] = {}
_before_fork: Final = threading.local()
"""The signals that the thread had blocked before it began to fork, in ``mask``."""


def handle(
    number: signal.Signals, handler: Handler, *, in_children: Handler = signal.SIG_DFL
) -> Handler:
    """Sets a handler, as `signal.signal`; returns the one that stood before.

    Args:
        in_children: The handler of forked processes, if there was none before.
    """
    before = signal.signal(number, handler)
    _note(number, before or in_children)
    return before or signal.SIG_DFL


def handle_on(
    loop: asyncio.AbstractEventLoop,
    number: signal.Signals,
    callback: Callable[..., object],
    *args: object,
) -> None:
    """Has the loop call the function when the signal arrives, as
    ``loop.add_signal_handler``."""
    before = signal.getsignal(number)
    loop.add_signal_handler(number, callback, *args)
    _note(number, before or signal.SIG_DFL)


def _note(number: signal.Signals, before: Handler) -> None:
    known = _handled.get(number)
    if known is None or before not in known.ours:
        known = HandledSignal(before)
    if (ours := signal.getsignal(number)) not in known.ours:
        known.ours.append(ours)
    _handled[number] = known


def _hold_back() -> None:
    """Blocks the signals that are handled here, until the fork is over: one that comes
    to the child before `_reset` would wake the parent."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _reset() -> None:
    """In the child, before anything else runs in it."""
    if _handled:
        signal.set_wakeup_fd(-1)
    for number, known in _handled.items():
        # Not what somebody else has set since.
        if signal.getsignal(number) in known.ours:
            signal.signal(number, known.before)
    _handled.clear()
    _let_through()


os.register_at_fork(
    before=_hold_back, after_in_parent=_let_through, after_in_child=_reset
)
