"""A program's hold on its cluster: one session, from connect to close.

The handle that the strategy owns. It lives on the user's side; what runs on the loop
(`Cluster`) does not know it, so that dropping the strategy drops the session.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final

from zstrat.ps import PsUpdate, Ref
from zstrat.transport import Link, Security, hello, new_incarnation
from zstrat.wire import Job, UpdateOp, VariableEntry

from ._cluster import Cluster
from ._portal import Portal

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    import numpy as np

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings
    from zstrat.variables import VariableSpec

    from ._lane import MakeLink

T = TypeVar("T")


@final
class ClusterSession:
    """The tasks of a cluster, for as long as this program holds them.

    Every blocking method has a twin ``..._async`` that may be awaited on any event
    loop; cancelling one gives up its outcome, while what was sent is carried out.

    Raises, all methods:
        PSUnavailableError: A parameter server that the call needs is gone.
        ClosedError: After `close`.
        DeadlineExceededError: There was no answer within ``timeouts.request``.
    """

    def __init__(self, cluster: Cluster, portal: Portal, settings: Settings) -> None:
        self.cluster, self.portal, self.settings = cluster, portal, settings
        self.lock = threading.Lock()
        self.faces: dict[str, Any] = {}
        """What was made for this session once: its coordinators. Guarded by `lock`."""
        self.next_step = 1
        """Steps are unique in the session, whichever coordinator numbers them."""
        portal.at_close(partial(cluster.close, False))
        weakref.finalize(self, portal.retire).atexit = False

    @staticmethod
    def connect(
        spec: ClusterSpec, settings: Settings, *, make_link: MakeLink | None = None
    ) -> ClusterSession:
        """Takes the cluster: all its parameter servers, and a worker at least.

        Blocks for at most ``timeouts.connect``. Workers that come later join later.

        Args:
            make_link: How a task is reached; left out: over ZeroMQ.

        Raises:
            ValueError: The indices of the parameter servers have gaps.
            DeadlineExceededError: Tasks did not answer; each one is named.
            BusyError: Another coordinator that is alive holds the cluster.
            VersionMismatchError, PermissionDeniedError: A task will never take us.
        """
        session = new_incarnation()
        ps, workers = _parameter_servers(spec), _workers(spec)
        make = make_link or _links(session, settings)
        portal = Portal(f"zstrat {session:x}")

        async def open_() -> Cluster:
            cluster = Cluster(
                session,
                ps,
                workers,
                settings.timeouts,
                make,
                _prefetch(settings, workers),
            )
            try:
                await cluster.open()
            except BaseException:
                await cluster.close(False)
                raise
            return cluster

        try:
            # The cluster keeps its own deadline, and names who missed it.
            slack = settings.timeouts.connect + settings.timeouts.drain
            cluster = portal.run(open_(), slack, "connecting to the cluster")
        except BaseException:
            portal.close()
            raise
        return ClusterSession(cluster, portal, settings)

    # ---- what it is ------------------------------------------------------------------

    @property
    def session(self) -> int:
        """The number that all requests of this session carry."""
        return self.cluster.session

    @property
    def ps_count(self) -> int:
        return len(self.cluster.ps)

    @property
    def worker_count(self) -> int:
        return len(self.cluster.workers)

    @property
    def platform(self) -> str:
        """What the workers compute on: "cpu", "gpu" or "tpu"."""
        return self.cluster.opened.platform

    @property
    def devices(self) -> int:
        """Local devices of one worker."""
        return self.cluster.opened.devices

    # ---- parameter servers -----------------------------------------------------------

    def create_variables(
        self, variables: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> None:
        """Creates the variables with these values, where their specs say."""
        self._run(self._create(variables), "creating variables")

    async def create_variables_async(
        self, variables: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> None:
        await self._run_async(self._create(variables), "creating variables")

    def delete_variables(self, specs: Sequence[VariableSpec]) -> None:
        """Frees the variables."""
        self._run(self._delete(specs), "deleting variables")

    def read(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]:
        """The values, in order; read-only arrays. One request per server."""
        return self._run(self._read(specs), "reading variables")

    async def read_async(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]:
        return await self._run_async(self._read(specs), "reading variables")

    def update(
        self,
        spec: VariableSpec,
        op: UpdateOp,
        optimizer_id: int,
        arrays: Sequence[np.ndarray],
    ) -> None:
        """Applies one update; returns when every reader sees it.

        Args:
            optimizer_id: 0 unless ``op`` is one of the OPTIMIZE kinds.
        """
        self._run(self._update(spec, op, optimizer_id, arrays), "updating a variable")

    async def update_async(
        self,
        spec: VariableSpec,
        op: UpdateOp,
        optimizer_id: int,
        arrays: Sequence[np.ndarray],
    ) -> None:
        work = self._update(spec, op, optimizer_id, arrays)
        await self._run_async(work, "updating a variable")

    def create_optimizer(self, optimizer_id: int, name: str, code: bytes) -> None:
        """Gives the optimizer to all parameter servers."""
        work = self._create_optimizer(optimizer_id, name, code)
        self._run(work, "creating an optimizer")

    async def create_optimizer_async(
        self, optimizer_id: int, name: str, code: bytes
    ) -> None:
        work = self._create_optimizer(optimizer_id, name, code)
        await self._run_async(work, "creating an optimizer")

    # ---- the end ---------------------------------------------------------------------

    def close(self, exit: bool = False) -> None:  # noqa: A002
        """Leaves the cluster. Idempotent, and safe at the exit of the interpreter.

        Args:
            exit: Workers and parameter servers drain and end as processes.
        """
        if exit and not self.portal.is_closed:
            self.portal.at_close(partial(self.cluster.close, True))
        self.portal.close()

    # ---- private ---------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return self.portal.run(work, self.settings.timeouts.request, what)

    async def _run_async(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return await self.portal.run_async(work, what)

    def _require_ps(self) -> None:
        broken = self.cluster.broken
        if broken is not None:
            raise broken

    async def _create(
        self, variables: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> None:
        self._require_ps()
        await self.cluster.client.create(
            [
                (
                    spec.ps,
                    VariableEntry(spec.key, spec.name, spec.trainable, False),
                    array,
                )
                for spec, array in variables
            ]
        )

    async def _delete(self, specs: Sequence[VariableSpec]) -> None:
        self._require_ps()
        await self.cluster.client.delete([Ref(spec.ps, spec.key) for spec in specs])

    async def _read(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]:
        self._require_ps()
        return await self.cluster.client.pull([Ref(s.ps, s.key) for s in specs])

    async def _update(
        self,
        spec: VariableSpec,
        op: UpdateOp,
        optimizer: int,
        arrays: Sequence[np.ndarray],
    ) -> None:
        self._require_ps()
        update = PsUpdate(spec.ps, spec.key, op, optimizer, tuple(arrays))
        await self.cluster.client.push(-1, 0, 0, [update])

    async def _create_optimizer(self, optimizer: int, name: str, code: bytes) -> None:
        self._require_ps()
        await self.cluster.client.create_optimizer(optimizer, name, code)


def _parameter_servers(spec: ClusterSpec) -> list[str]:
    """Their addresses: a variable names its server by its place here."""
    indices = spec.task_indices("ps")
    if indices != list(range(len(indices))):
        raise ValueError(
            f"the cluster has the parameter servers {indices}: number ps from 0 "
            "without gaps, all programs of a cluster must know all of them; only "
            "workers may be left out"
        )
    return [spec.task_address("ps", index) for index in indices]


def _workers(spec: ClusterSpec) -> dict[int, str]:
    return {
        index: spec.task_address("worker", index)
        for index in spec.task_indices("worker")
    }


def _prefetch(settings: Settings, workers: Mapping[int, str]) -> int:
    # The steps of several workers interleave, so reading a value before one's own last
    # push is nothing new; with one worker it would be the only staleness there is.
    if settings.prefetch is not None:
        return settings.prefetch
    return 1 if len(workers) > 1 else 0


def _links(session: int, settings: Settings) -> MakeLink:
    """Links over ZeroMQ, with the coordinator's key if there are keys."""
    keys = None if settings.keys is None else Security.load(settings.keys, Job.CHIEF)
    me = hello(Job.CHIEF, 0, session)
    return partial(Link, me=me, settings=settings, security=keys)
