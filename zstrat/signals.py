"""Signal handlers that forked processes do not inherit.

A forked process, as of a `multiprocessing.Pool`, inherits the handlers of the program
and the descriptor that wakes its event loop. Then SIGTERM would not end the child, but
wake the parent, which would handle the signal as if it were its own.

Law: all signal handlers of zstrat are set here. In a forked process the handlers from
before zstrat are restored, and its signals do not wake the parent.
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
"""A handler as `signal.signal` takes it; None: one that was not set by Python."""


@dataclass
class HandledSignal:
    """The handlers of one signal: ``before`` is the one that zstrat replaced, ``ours``
    are those that zstrat has set."""

    before: Handler
    ours: list[Handler] = field(default_factory=list)


_handled: Final[dict[signal.Signals, HandledSignal]] = {}
# Several threads may fork at a time.
_before_fork: Final = threading.local()
"""Per thread, ``mask``: the signals that it blocked before it forked."""


def handle(
    number: signal.Signals, handler: Handler, *, in_children: Handler = signal.SIG_DFL
) -> Handler:
    """Sets a handler, like `signal.signal`; returns the previous one.

    Args:
        in_children: The handler to set in forked processes, if none was set before.
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
    """Makes the loop call ``callback`` for a signal, like
    ``loop.add_signal_handler``."""
    before = signal.getsignal(number)
    loop.add_signal_handler(number, callback, *args)
    _note(number, before or signal.SIG_DFL)


def _note(number: signal.Signals, before: Handler) -> None:
    known = _handled.get(number)
    # Somebody else has set a handler since ours: what is there now is what was before.
    if known is None or before not in known.ours:
        known = HandledSignal(before)
    if (ours := signal.getsignal(number)) not in known.ours:
        known.ours.append(ours)
    _handled[number] = known


def _block() -> None:
    """Blocks the handled signals during a fork: a signal to the child before `_reset`
    would wake the parent."""
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _reset() -> None:
    """Restores, in a forked child, the handlers from before zstrat, before anything
    else runs."""
    if _handled:
        signal.set_wakeup_fd(-1)
    for number, known in _handled.items():
        # Unless other code replaced our handler.
        if signal.getsignal(number) in known.ours:
            signal.signal(number, known.before)
    _handled.clear()
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)
