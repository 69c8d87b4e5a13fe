"""Who waits for a task to greet, and what is known of why it does not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zstrat.errors import DeadlineExceededError

if TYPE_CHECKING:
    from zstrat.wire import Hello


class Opening:
    """Of a link to ``target`` ("/job:ps/task:0 at 10.0.0.1:2222")."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._refusal: Exception | None = None
        self._waiters: set[asyncio.Future[Hello]] = set()
        self.trouble = "nothing answers there"
        """What is wrong so far, for whoever waits in vain."""

    async def wait(self, deadline: float) -> Hello:
        """The HELLO of the task, once it is there.

        Args:
            deadline: Loop time.

        Raises:
            DeadlineExceededError: It did not greet in time; says what is known.
            Exception: It refused us, we refused it, or the link was closed.

        Cancellation: nothing is lost.
        """
        if self._refusal is not None:
            raise again(self._refusal)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Hello] = loop.create_future()
        self._waiters.add(waiter)
        started = loop.time()
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self._target} did not answer within "
                f"{loop.time() - started:.1f} s: {self.trouble}; check that it "
                "runs, that the address is right and that no firewall is in between"
            ) from None
        finally:
            self._waiters.discard(waiter)

    def opened(self, hello: Hello) -> None:
        """The task greeted."""
        self._refusal = None
        self.trouble = "it was connected before"
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(hello)

    def refuse(self, error: Exception) -> None:
        """One side does not want the other: waiting longer is of no use."""
        self._refusal = error
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the wait of all."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(again(error))


def again(error: Exception) -> Exception:
    """Another one like it: an exception that is raised twice collects tracebacks."""
    return type(error)(*error.args)
