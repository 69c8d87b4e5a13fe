"""Handles the signals that end a command in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any, NoReturn

from zstrat.signals import handle, handle_on

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator


def endings() -> list[signal.Signals]:
    """Returns the signals that end a command; SIGHUP only if it is not ignored, as
    under nohup."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """Makes the signals raise KeyboardInterrupt with their number in the block, and
    restores the handlers after it."""
    before = {number: handle(number, _interrupt) for number in endings()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """Returns the exit code of a program that a signal ended, as in a shell."""
    return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)


@contextlib.contextmanager
def handled_by(callback: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Calls ``callback`` on the running loop for each of the signals in the block.
    After it the signals have their default effect."""
    loop, numbers = asyncio.get_running_loop(), endings()
    for number in numbers:
        handle_on(loop, number, callback, number)
    try:
        yield
    finally:
        for number in numbers:  # uvloop does not remove its handlers when it is closed
            loop.remove_signal_handler(number)


async def interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Returns the exit code of ``work``, which a signal cancels; then it is 128 + the
    number of the signal, as in a shell."""
    task = asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    with handled_by(cancel):
        try:
            return await work
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]
