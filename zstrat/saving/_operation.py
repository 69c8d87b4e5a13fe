"""What saves and restores have in common: their event loop, their order, their files,
and clusters that rest meanwhile.

One coroutine serves both forms of a call. The blocking form runs the coroutine to its
end in a loop on a separate thread: a notebook's thread has a running loop already, and
a Ctrl-C in the middle of a loop could lose the wake-up of a task, which would then be
awaited forever. Ctrl-C instead cancels the coroutine, which cleans up as a cancelled
task does. Each operation accesses files on one named thread, one call after the other.
At a terminal, `ProgressBar` shows the progress.

Saves and restores of the same objects run one after the other (`in_turn`). Two that run
at the same time, in threads or in tasks, would mix: a save would take some values from
before a restore and some from after it, and two saves would use one number.

Law of turns: an operation waits only for earlier ones that have an object in common
with it, so no two operations wait for each other. An operation may wait for its turn on
any thread and any event loop.

The clusters that store the variables are held between two steps meanwhile (`at_rest`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    NamedTuple,
    ParamSpec,
    TextIO,
    TypeAlias,
    TypeVar,
)

from zstrat.coordinator import until_settled
from zstrat.program import hide_frames
from zstrat.strategy import ServerVariables
from zstrat.transport import Portal, warn_of_blocking
from zstrat.variables import StorageWithSlots

from ._graph import graph_of

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Coroutine,
        Hashable,
        Iterable,
    )

    from zstrat.coordinator import ClusterSession, SessionCut
    from zstrat.variables import VariableHandle


T = TypeVar("T")
P = ParamSpec("P")


_blocked_loop: Final[ContextVar[asyncio.AbstractEventLoop | None]] = ContextVar(
    "zstrat_held_up", default=None
)
"""The event loop that a blocking call blocks until it returns, if any. Set by
`run_blocking` alone."""


def run_blocking(work: Coroutine[Any, Any, T], twin: str = "") -> T:
    """Runs the coroutine to its end, also if a loop is running on this thread.
    Tracebacks of its errors have the user's lines alone.

    Args:
        twin: Name of the coroutine function that a program with a running loop awaits
            instead, if there is one.

    Cancellation: Ctrl-C cancels the coroutine, and is raised when the coroutine has
    cleaned up.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    token = _blocked_loop.set(loop)
    try:
        if twin:
            warn_of_blocking(twin)
        # A loop for this call alone: nothing else can hold it up or cancel its tasks.
        portal = Portal("zstrat saving")
        portal.at_close(_cancelled_tasks_ended)
        try:
            return portal.run(work, math.inf, "saving or restoring")
        finally:
            portal.close()
    except Exception as error:  # to the caller
        hide_frames(error)
        raise
    finally:
        _blocked_loop.reset(token)
        # Ctrl-C before a caller had it: Python would warn that it was never awaited.
        if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()


async def _cancelled_tasks_ended() -> None:
    """Waits until tasks that Ctrl-C has cancelled have cleaned up; otherwise the end of
    the loop would cancel them again."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)


@dataclass(slots=True, eq=False)
class _Turn:
    keys: frozenset[Hashable]
    loop: asyncio.AbstractEventLoop
    waiting: list[Future[None]] = field(default_factory=list)


_turns_lock: Final = threading.Lock()
_turns: Final[list[_Turn]] = []
"""The operations that have begun or wait for their turn, in the order of their
calls."""


@contextlib.asynccontextmanager
async def in_turn(root: Any) -> AsyncIterator[None]:
    """Waits until no earlier save or restore has an object in common with the objects
    below ``root``; later ones wait until this block has ended. Blocks cannot be nested.

    Raises:
        TypeError: An object below ``root`` cannot be saved.
        RuntimeError: An earlier operation runs on the event loop that this operation, a
            blocking call, blocks: neither would end.

    Cancellation: the turn is given up.
    """
    graph = graph_of(root)  # held: ids are of living objects
    own = _Turn(frozenset(_keys_of(graph.nodes)), asyncio.get_running_loop())
    before: list[Future[None]] = []
    # Looked for and entered under one lock: turns are in one order for all threads, so
    # no two wait for each other.
    with _turns_lock:
        # Those, too, that the earlier ones wait for.
        keys, loops = own.keys, set[asyncio.AbstractEventLoop]()
        for turn in reversed(_turns):
            if not turn.keys.isdisjoint(keys):
                keys |= turn.keys
                loops.add(turn.loop)
        if _blocked_loop.get() in loops:
            raise RuntimeError(
                "a save or restore of the same objects is under way on the event loop "
                "of this thread, which a blocking call would hold up: await that one "
                "first, or call the form that ends in _async"
            )
        for turn in _turns:
            if not turn.keys.isdisjoint(own.keys):
                before.append(Future())
                turn.waiting.append(before[-1])
        _turns.append(own)
    try:
        for earlier in before:
            await asyncio.wrap_future(earlier)
        yield
    finally:
        with _turns_lock:
            _turns.remove(own)
        # Futures of threads, not of loops: a later turn may wait on any loop. One that
        # was cancelled refuses a result.
        for waiter in own.waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)


def _keys_of(nodes: Any) -> list[Hashable]:
    """Returns keys that identify the root, and each variable, optimizer and iterator
    below it; two handles of one variable have the same key."""
    keys: list[Hashable] = [id(nodes[0].value)]
    for node in nodes:
        if node.kind == "variable":
            # By storage and key: a handle that was unpickled is another object.
            parts = node.value.components
            keys += [(id(part.storage), part.spec.key) for part in parts]
        elif node.kind != "group":
            keys.append(id(node.value))
    return keys


class FileThread:
    """The thread on which an operation accesses files; an async context manager.

    Cancellation: a call that has begun ends before the next one begins.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "zstrat disk")

    async def __call__(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, functools.partial(function, *args, **kwargs)
        )

    async def make(
        self,
        undo: Callable[[T], object],
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Calls a function on the thread; its result needs ``undo`` if the caller does
        not get it. Cancellation: calls ``undo`` with the result when the call has
        ended."""
        making = self._pool.submit(functools.partial(function, *args, **kwargs))
        # Shielded: cancelling must not lose the result of a call that has begun, such
        # as an open file or a lock.
        try:
            return await asyncio.shield(asyncio.wrap_future(making))
        except asyncio.CancelledError:
            making.add_done_callback(functools.partial(_undo, undo))
            raise

    async def __aenter__(self) -> FileThread:
        return self

    async def __aexit__(self, *_: object) -> None:
        # What is under way is a piece of a file: waiting for it takes milliseconds.
        self._pool.shutdown()


def _undo(undo: Callable[[T], object], made: Future[T]) -> None:
    if not made.cancelled() and made.exception() is None:
        undo(made.result())


_PAUSE: Final = 0.1
"""Seconds between two updates of the line: faster than anybody reads."""
_REPORT_AFTER_SECONDS: Final = 0.5
"""Seconds after which the progress of an operation is shown."""
_WIDTH: Final = 24
"""Characters of the bar itself: with the numbers the line fits into a terminal of
80."""


class ProgressBar:
    """Shows a line such as ``saving ckpt-5 [######      ] 1.2 of 4.8 GB``, rewritten in
    place.

    Args:
        total: Number of bytes of the operation.
        out: Stream to write to; left out: standard error.
    """

    def __init__(self, what: str, total: int, out: TextIO | None = None) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._out = sys.stderr if out is None else out
        # A program without a console (pythonw, some daemons) has no standard error.
        self._is_shown = self._out is not None and self._out.isatty()
        self._next = time.monotonic() + _REPORT_AFTER_SECONDS
        self._has_written = False

    def add(self, size: int) -> None:
        """Adds ``size`` to the number of bytes that are done."""
        self._done += size
        if self._is_shown and (now := time.monotonic()) >= self._next:
            self._next = now + _PAUSE
            self._show()

    def end(self) -> None:
        """Removes the line from the terminal."""
        if self._has_written:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._has_written = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _show(self) -> None:
        share = min(1.0, self._done / self._total) if self._total else 1.0
        bar = "#" * round(share * _WIDTH)
        size = f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB"
        self._out.write(f"\r{self._what} [{bar:<{_WIDTH}}] {size}\x1b[K")
        self._out.flush()
        self._has_written = True


Run: TypeAlias = "Callable[[Coroutine[Any, Any, Any], str], Awaitable[Any]]"
"""A function that runs a coroutine of a `PsClient` on the loop of its cluster, from any
loop, as `ClusterSession.run_async` does. Cancellation: cancels the coroutine."""


class ClusterMoment(NamedTuple):
    """The moment at which values of a cluster were saved or loaded: which steps came
    before it, and how many times servers had been restored."""

    cluster: ClusterSession
    cut: SessionCut | None
    restores: int


def cluster_of(variable: VariableHandle) -> ClusterSession | None:
    """Returns the cluster that stores a variable, None if this process stores it.

    Raises:
        RuntimeError: The variable is stored elsewhere: the handle came from another
            task.
    """
    storage = variable.storage
    if isinstance(storage, StorageWithSlots):
        return None
    if isinstance(storage, ServerVariables):
        return storage.session
    raise RuntimeError(
        f"{variable.spec} at {variable.device} cannot be saved or restored from here: "
        "this handle came from another task; checkpoints are written by the coordinator"
    )


def clusters_of(variables: Iterable[VariableHandle]) -> list[ClusterSession]:
    """Returns the clusters that store any of the variables, each once.

    Raises: As `cluster_of`.
    """
    found = {id(at): at for each in variables if (at := cluster_of(each)) is not None}
    return list(found.values())


@contextlib.asynccontextmanager
async def at_rest(
    clusters: Iterable[ClusterSession],
) -> AsyncIterator[list[ClusterMoment]]:
    """Holds all of the clusters between two steps while the block runs; yields the
    moment of each."""
    async with contextlib.AsyncExitStack() as resting:
        moments = []
        for cluster in clusters:
            # Before it rests: a server that is restored while we wait counts as lost.
            restores = cluster.restores
            cut = await resting.enter_async_context(cluster.at_rest())
            moments.append(ClusterMoment(cluster, cut, restores))
        yield moments


async def retried_if_restored(
    variables: Iterable[VariableHandle], work: Callable[[], Awaitable[T]]
) -> T:
    """Runs work that may be done twice; repeats it if it failed because a parameter
    server was lost that was then restored, was replaced, or came back.

    Raises:
        PSUnavailableError: A server did not come back, or could not be restored.
    """
    return await until_settled(clusters_of(variables), work)
