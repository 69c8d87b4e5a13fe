"""Workers that join a running cluster which does not list them.

Such a worker joins the session of the training program: it reports itself to a
parameter server, the only address that it needs, and the program of that server
decides. With the addresses of several servers the worker tries one after the other
until one answers. When the session ends, the worker reports itself again for the next
program.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import DeadlineExceededError, PeerLostError
from zstrat.transport import Link, check_address, check_reachable, hello
from zstrat.wire import AnswerReport, Job, ReportWorker

from ._task import load_keys

if TYPE_CHECKING:
    from zstrat.config import Settings
    from zstrat.worker import WorkerService


log = logging.getLogger("zstrat.task")

UNNUMBERED: Final = -1
"""The task index of a worker that has none yet."""
_PROGRAM_WAIT: Final = 86400.0
"""Seconds that a worker waits for the next program before it reports itself again."""
_TURN: Final = 30.0
"""Seconds that a worker waits at one of several servers before it tries the next,
because a server may have lost its program while the others have one."""
_SLACK: Final = 5.0
"""Seconds beyond a report's deadline for the server to answer that the time is up."""


@dataclass(frozen=True, slots=True)
class JoinAddresses:
    """The addresses of one or more parameter servers, and the ``address`` at which
    others reach the worker.

    Raises:
        ValueError: An address is invalid.
    """

    servers: tuple[str, ...]
    address: str

    def __post_init__(self) -> None:
        for server in self.servers:
            check_address(server)
        check_reachable(self.address)


@final
class WorkerJoin:
    """Reports one worker process to the program of a parameter server. ``incarnation``
    is that of its task."""

    def __init__(
        self, addresses: JoinAddresses, settings: Settings, incarnation: int
    ) -> None:
        self._addresses, self._settings = addresses, settings
        self._incarnation = incarnation

    async def number(self) -> int:
        """Asks the program for an index that no worker has or had.

        Raises:
            ZstratError: The program or the server refuses the worker.
            DeadlineExceededError: No program started within ``timeouts.connect``.

        Cancellation: has no effect on the program.
        """
        return await self._report(UNNUMBERED, self._settings.timeouts.connect)

    async def stay(self, index: int, worker: WorkerService) -> None:
        """Reports the worker, which serves already, now and after each session. Returns
        only by an error.

        Raises: As `number`.

        Cancellation: the worker is no longer reported.
        """
        timeout = self._settings.timeouts.connect
        while True:
            # Read before the report: the session may open while the answer travels.
            before = worker.sessions
            try:
                await self._report(index, timeout)
            except DeadlineExceededError:
                if worker.sessions == before:
                    # Once a program had this worker, the next one may come much later;
                    # the first one is expected within the timeout of the user.
                    if timeout != _PROGRAM_WAIT:
                        raise
                    continue
                # The program has come, and its answer was lost with the server.
            log.info("in the session of the program as worker %d", index)
            await worker.wait_left(before)
            timeout = _PROGRAM_WAIT

    async def _report(self, index: int, timeout: float) -> int:
        """Reports the worker to one server after the other; returns the task index that
        the program of a server answers.

        Raises:
            DeadlineExceededError: No program answered within ``timeout`` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        servers = self._addresses.servers
        failures: dict[str, str] = {}
        for server in itertools.cycle(servers):
            # A single server gets the whole time. Of several, one that is dead must not
            # use it up: it has to complete the handshake as fast as a live peer does.
            greeted = until = deadline
            if len(servers) > 1:
                greeted = min(until, loop.time() + self._settings.timeouts.liveness)
                until = min(until, loop.time() + _TURN)
            try:
                return await self._report_at(server, index, greeted, until)
            except PeerLostError:
                # No pause is needed: the next report waits until a server answers.
                continue
            except DeadlineExceededError as error:
                failures[server] = str(error)
                if loop.time() >= deadline:
                    break
                log.info("trying the next server: %s", error)
        raise DeadlineExceededError("; ".join(failures.values()))

    async def _report_at(
        self, server: str, index: int, greeted: float, until: float
    ) -> int:
        """Reports the worker to this server and waits for the answer of its program
        until ``until``; returns the task index. The server has to complete the
        handshake by ``greeted``. Both are loop times."""
        loop = asyncio.get_running_loop()
        link = self._link(server, index)
        link.start()
        try:
            await link.wait_open(greeted)
            left = max(0.0, until - loop.time())
            # The server counts the time as well, and answers with its own error, which
            # knows more than a deadline here: hence `_SLACK`.
            report = ReportWorker(self._addresses.address, index, left)
            log.info("reported to %s, waiting for its program", server)
            answer = await link.request(report, deadline=until + _SLACK)
            assert isinstance(answer, AnswerReport), answer
            return answer.index
        finally:
            await link.close()

    def _link(self, server: str, index: int) -> Link:
        """Makes a new link to a server, for each report, as the keys may have changed.
        The handshake has no index unless the key is bound to one: the program decides
        which worker has an index, not the order of connections."""
        security = load_keys(self._settings.keys, Job.WORKER, index)
        if security is None or security.index is None:
            index = UNNUMBERED
        return Link(
            server,
            hello(Job.WORKER, index, self._incarnation),
            name="the parameter server",
            settings=self._settings,
            security=security,
            expect=(Job.PS, None),
        )
