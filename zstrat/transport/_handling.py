"""Hands each request to the handler of its endpoint, and sends its outcome, once.

A handler answers at once, later by a future, or by a coroutine, which this file runs as
a task. What it raises is the outcome of the request; of a notice, for whose outcome
nobody waits, it becomes a line in the log.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, cast, get_args

from zstrat.errors import CancelledError, ZstratError
from zstrat.wire import Done, Message
from zstrat.wire.connection import failure

from ._seldom import Seldom

if TYPE_CHECKING:
    from zstrat.wire import Sink

    from ._remote import Connection, Remote

Handler = Callable[["Remote", Message], Message | Awaitable[Message] | None]
"""Called on the loop for every request and notice. What it returns or raises is the
outcome of the request; None stands for `Done`. Of a notice nothing is returned."""

_MESSAGES: Final = frozenset(get_args(Message))
_LOG: Final = logging.getLogger("zstrat.transport")


class Handling:
    """Hands the messages of all connections of ``task`` to one handler."""

    def __init__(self, task: str, handler: Handler) -> None:
        self._task, self._handler = task, handler
        self._tasks: set[asyncio.Task[Message]] = set()
        self._is_over = False
        self._seldom = Seldom(time.monotonic)
        self.messages = 0
        """Handed on since the start."""

    def __len__(self) -> int:
        """Handlers that run."""
        return len(self._tasks)

    def serve(
        self,
        connection: Connection,
        number: int | None,
        message: Message,
        sink: Sink | None = None,
    ) -> None:
        """A request, or a notice, which has no number."""
        remote = connection.remote
        assert remote is not None
        self.messages += 1
        try:
            result = self._handler(remote, message) if sink is None else sink.finish()
        except Exception as error:  # goes to the caller, who is to blame more often
            remote.promised = 0
            self._fail(connection, number, error)
            return
        if remote.promised:
            if number is not None:
                connection.outlet.peer.promise(number, remote.promised)
            remote.promised = 0
        if result is None or type(result) in _MESSAGES:
            if number is not None:
                answer = Done() if result is None else cast("Message", result)
                connection.outlet.peer.reply(number, answer)
        elif isinstance(result, asyncio.Future):
            result.add_done_callback(partial(self._finished, connection, number))
        elif inspect.isawaitable(result):
            task = asyncio.get_running_loop().create_task(
                _outcome(result), name=f"{type(message).__name__} of {remote.name}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(self._finished, connection, number))
        else:
            wrong = TypeError(
                f"the handler returned {type(result).__name__}: no message"
            )
            self._fail(connection, number, wrong)

    async def end(self) -> None:
        """Cancels the handlers that run, and waits until they have ended.

        Cancellation: they are cancelled; some may not have ended.
        """
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finished(
        self,
        connection: Connection,
        number: int | None,
        future: asyncio.Future[Message],
    ) -> None:
        error: BaseException | None
        if future.cancelled():
            error = CancelledError("the task cancelled the request")
        else:
            error = future.exception()
        if error is not None:
            self._fail(connection, number, error)
        elif number is not None:
            connection.outlet.peer.reply(number, future.result())
        if not self._is_over:
            connection.outlet.flush()

    def _fail(
        self, connection: Connection, number: int | None, error: BaseException
    ) -> None:
        if number is not None:
            connection.outlet.peer.reply(number, failure(error))
            return
        if self._seldom.may_say():
            _LOG.error(
                "%s: a notice of %s failed (%d so far): %s",
                self._task,
                connection.outlet.peer.name,  # which may be gone by now
                self._seldom.count,
                error,
                # An error of ours says all; any other is a defect of somebody's.
                exc_info=None if isinstance(error, ZstratError) else error,
            )


async def _outcome(result: Awaitable[Message]) -> Message:
    return await result
