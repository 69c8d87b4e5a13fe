"""Brings a worker that no program knows into the session of the one that trains.

It reports itself at a parameter server, whose program decides, and whose address is the
only one that it has to know. Who knows those of several servers asks at one after the
other until it is answered. It does so again whenever its session is over, for the next
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
"""The index of a worker that has none yet."""

_PROGRAM_WAIT: Final = 86400.0
"""Seconds that a worker waits for the next program before it asks once more."""
_TURN: Final = 30.0
"""Seconds that it waits at one of several servers, which may serve no program any more
while the others do, before it asks at the next."""
_SLACK: Final = 5.0
"""Seconds for the server to report that the time is up, beyond the deadline."""


@dataclass(frozen=True, slots=True)
class JoinAddresses:
    """``servers``: the addresses of parameter servers, one at least; ``address``: where
    others reach the worker.

    Raises:
        ValueError: One of them is none.
    """

    servers: tuple[str, ...]
    address: str

    def __post_init__(self) -> None:
        for server in self.servers:
            check_address(server)
        check_reachable(self.address)


@final
class WorkerJoin:
    """Brings one process in. ``incarnation`` is that of its task."""

    def __init__(
        self, place: JoinAddresses, settings: Settings, incarnation: int
    ) -> None:
        self._place, self._settings = place, settings
        self._incarnation = incarnation

    async def number(self) -> int:
        """Asks the program for a number, which nobody else has or ever had.

        Raises:
            ZstratError: The program does not take the worker, or the server does not
                let it in; says why.
            DeadlineExceededError: There was no program for ``timeouts.connect``.

        Cancellation: nothing has happened.
        """
        return await self._report(UNNUMBERED, self._settings.timeouts.connect)

    async def stay(self, index: int, worker: WorkerService) -> None:
        """Reports the worker, which serves by now, and again each time that it is in no
        session any more. Ends by an error alone.

        Raises: As `number`.

        Cancellation: it is reported no more.
        """
        timeout = self._settings.timeouts.connect
        while True:
            before = worker.sessions
            try:
                await self._report(index, timeout)
            except DeadlineExceededError:
                if worker.sessions == before:
                    if timeout != _PROGRAM_WAIT:
                        raise
                    continue
                # The program has come, and its answer was lost with the server.
            log.info("in the session of the program as worker %d", index)
            await worker.wait_left(before)
            timeout = _PROGRAM_WAIT

    async def _report(self, index: int, timeout: float) -> int:
        """Reports at one server after the other; the number that the program says."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        servers = self._place.servers
        failures: dict[str, str] = {}
        for server in itertools.cycle(servers):
            greeted = until = deadline
            if len(servers) > 1:
                greeted = min(until, loop.time() + self._settings.timeouts.liveness)
                until = min(until, loop.time() + _TURN)
            try:
                return await self._report_at(server, index, greeted, until)
            except PeerLostError:
                continue  # the next report waits until a server is there
            except DeadlineExceededError as error:
                failures[server] = str(error)
                if loop.time() >= deadline:
                    break
                log.info("asks at the next server: %s", error)
        raise DeadlineExceededError("; ".join(failures.values()))

    async def _report_at(
        self, server: str, index: int, greeted: float, until: float
    ) -> int:
        """Reports at this server, which has to greet in time, and waits there for its
        program. Both deadlines are loop times."""
        loop = asyncio.get_running_loop()
        link = self._link(server, index)
        link.start()
        try:
            await link.wait_open(greeted)
            left = max(0.0, until - loop.time())
            report = ReportWorker(self._place.address, index, left)
            log.info("reported at %s: waits for its program", server)
            answer = await link.request(report, deadline=until + _SLACK)
            assert isinstance(answer, AnswerReport), answer
            return answer.index
        finally:
            await link.close()

    def _link(self, server: str, index: int) -> Link:
        """For each report its own: keys may have changed since the last one. It is that
        of a worker without a number, unless its key has one: whose the number is, the
        program decides, and not the server by who is connected to it."""
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
