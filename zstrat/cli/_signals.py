"""The signals that end a command in the foreground, and how they end its work."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any, NoReturn

from zstrat.signals import handle, handle_on

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator


def endings() -> list[signal.Signals]:
    """Ctrl-C, a request to end, and the end of the terminal, unless whoever started us
    (nohup) wanted us to outlive that."""
    found = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        found.append(signal.SIGHUP)
    return found


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """The signals raise KeyboardInterrupt, with their number, in the block; their
    handlers are restored behind it."""
    before = {number: handle(number, _interrupt) for number in endings()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def heard_by(hear: Callable[[signal.Signals], object]) -> Iterator[None]:
    """The running loop calls ``hear`` with each of the signals in the block. Behind it
    a signal ends the program, as it ends any program without handlers."""
    loop, numbers = asyncio.get_running_loop(), endings()
    for number in numbers:
        handle_on(loop, number, hear, number)
    try:
        yield
    finally:
        for number in numbers:  # uvloop leaves its own behind when it is closed
            loop.remove_signal_handler(number)


async def interruptible(work: Coroutine[Any, Any, int]) -> int:
    """The exit code of the work; if a signal cancels it, 128 and its number, as shells
    say."""
    task = asyncio.current_task()
    assert task is not None
    heard: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        heard.append(number)
        task.cancel()

    with heard_by(cancel):
        try:
            return await work
        except asyncio.CancelledError:
            if not heard:
                raise
            return 128 + heard[0]
