"""The storage of variables while an eager step runs: each read is a request.

An eager step has no plan, so it sends requests to the parameter servers as it runs, one
blocking round trip at a time. Updates wait until the step reads or ends, and are pushed
then. These pushes are parts 0, 1, 2, … of the step; each part is applied once, however
often the step runs. A step that makes its updates after all reads has one part, and
fails or succeeds with it.

When a step runs again, its earlier runs have no further effect, and what they have
pushed stays applied. So the new run has to push the same updates, part by part;
otherwise it fails with an error that says where the runs differ. An update is
identified by a name: where in the user's code it was made, for which time, and what it
does. The name includes neither the operands nor which rows and components are updated,
because another run of the step may have other data and still counts as the same step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, final

from zstrat.errors import NotFoundError
from zstrat.program import digest, here, not_shared
from zstrat.ps import PsUpdate, Ref, RowsRef, ordinal, require_same
from zstrat.telemetry import Phase
from zstrat.transport import require_own
from zstrat.variables import LOCAL, Variable, encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zstrat.codecs import Wire
    from zstrat.ps import Clocks, EagerRun, PsClient
    from zstrat.telemetry import EagerNotes
    from zstrat.variables import (
        GradientCall,
        StorageRows,
        StorageUpdate,
        VariableHandle,
        VariableSpec,
    )

    from ._pushes import PushEncoding

MAX_UPDATES: Final = 4096
"""Most updates of one push: far fewer than fit into a header."""
MAX_WAITING_BYTES: Final = 256 * 2**20
"""Most bytes of operands that wait, not counting the last update."""
_MAX_NAME_CHARACTERS: Final = 1800
"""Most characters of the names of a push: the servers remember the names."""


@final
class WaitingUpdates:
    """The updates that one run of an eager step has made since its last push."""

    def __init__(self) -> None:
        self.specs: list[VariableSpec] = []
        self.updates: list[PsUpdate] = []
        self._names: list[str] = []
        self._nbytes = 0
        self.wires: dict[int, Wire] = {}
        """By number of an optimizer: the format in which its gradients are sent."""
        self._times: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self.updates)

    @property
    def is_full(self) -> bool:
        return len(self.updates) >= MAX_UPDATES or self._nbytes > MAX_WAITING_BYTES

    def add(self, updates: Sequence[StorageUpdate]) -> None:
        """Adds the updates of one call in the user's code, of one variable or of the
        rows of a table."""
        for variable, op, operands, optimizer in updates:
            spec = variable.spec
            rule = 0 if optimizer is None else optimizer.id
            if optimizer is not None and optimizer.wire is not None:
                self.wires[rule] = optimizer.wire
            self.updates.append(PsUpdate(spec.ps, spec.key, op, rule, operands))
            self.specs.append(spec)
            self._nbytes += sum(operand.nbytes for operand in operands)
        # One name for each call of the user's: it may be of the rows of many variables,
        # and names travel.
        self._names.append(self._name(updates))

    def take(self) -> tuple[list[PsUpdate], list[str]]:
        """Returns the waiting updates and their names, and removes them from the
        queue."""
        taken = self.updates, _bounded(self._names)
        self.updates, self.specs, self._names, self._nbytes = [], [], [], 0
        return taken

    def _name(self, updates: Sequence[StorageUpdate]) -> str:
        variable, op, operands, optimizer = updates[0]
        whole = None
        if len(operands) > 1 and isinstance(variable, Variable):
            whole = variable.sharded_container
        name = variable.name if whole is None else whole.name
        by = "" if optimizer is None else f" by {optimizer.name!r}"
        what = f"{op.name} of {name!r}{by} at {here()}"
        self._times[what] += 1
        times = self._times[what]
        return what if times == 1 else f"{what}, the {ordinal(times)} time"


def _bounded(names: list[str]) -> list[str]:
    length = 0
    for at, name in enumerate(names):
        length += len(name)
        # Beyond the limit a digest stands for the rest: it still tells a run that
        # differs, though not where.
        if length > _MAX_NAME_CHARACTERS:
            rest = digest("\n".join(names[at:]).encode()).hex()
            return [*names[:at], f"{len(names) - at} more updates ({rest})"]
    return names


T = TypeVar("T")
Ask = Callable[[Callable[["PsClient"], "asyncio.Future[T]"]], T]


class Asking:
    """Starts requests on the loop for another thread; that thread waits for their
    outcome."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: PsClient) -> None:
        self._loop, self._client = loop, client

    def __call__(self, start: Callable[[PsClient], asyncio.Future[T]]) -> T:
        """Starts the request and blocks until it has its outcome. The deadlines of the
        links bound the wait; they are put off while bodies of messages move."""
        require_own(self._loop, "reading or changing a variable in a step")
        return self.later(start).result()

    def later(
        self, start: Callable[[PsClient], asyncio.Future[T]]
    ) -> concurrent.futures.Future[T]:
        """Starts the request; returns a future of its outcome, which the calling thread
        can wait for."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._begin, start, answer)
        return answer

    def _begin(
        self,
        start: Callable[[PsClient], asyncio.Future[T]],
        answer: concurrent.futures.Future[T],
    ) -> None:
        try:
            future = start(self._client)
        except Exception as error:  # goes to the thread that waits
            answer.set_exception(error)
        else:
            future.add_done_callback(partial(_hand_over, answer))


@final
class Direct:
    """A `zstrat.variables.Storage` for one run of one eager step. Records how long the
    run waits, by ``clock``."""

    def __init__(
        self,
        ask: Asking,
        encoding: PushEncoding,
        clock: Callable[[], float],
        run: EagerRun,
        notes: EagerNotes,
    ) -> None:
        self._ask: Final = ask
        self._encoding: Final = encoding
        self._run: Final = run
        self._clock, self._notes = clock, notes
        self._read_at: Final[Clocks] = {}
        """For each server: its clock at the first read there."""
        self._own: Final[Counter[int]] = Counter()
        """For each server: how many parts of this step it has applied since the step
        began."""
        self._part = 0
        self._waiting: Final = WaitingUpdates()
        self._before: dict[int, tuple[str, ...]] | None = None
        # Under jax.jit reads are callbacks, on threads of XLA's.
        self._lock: Final = threading.RLock()

    @property
    def has_pushed(self) -> bool:
        """Whether updates may have been sent."""
        return self._part > 0

    def finish(self) -> None:
        """Pushes the waiting updates, after the body has run to its end.

        Raises:
            RetryDiffersError: An earlier run has pushed more than this one.
        """
        # First, as this may add a part.
        self._push()
        for part, names in sorted(self._done_before().items()):
            if part >= self._part:
                require_same(self._run.step, names, ())

    def read(self, variable: VariableHandle) -> np.ndarray:
        return self.read_many([variable])[0]

    def read_many(self, variables: Sequence[VariableHandle]) -> list[np.ndarray]:
        """Reads variables with one request per server, after pushing the waiting
        updates."""
        # A read has to see what this step has written before.
        self._push()
        specs = [_shared(variable) for variable in variables]
        refs = [Ref(spec.ps, spec.key) for spec in specs]
        with _named(*specs):
            return self._pull(refs)

    def read_rows(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        """Returns rows ``[n, ...]`` of each variable at its indices ``[n]``; one
        request per server.

        Raises:
            InvalidArgumentError: A row does not exist.
        """
        self._push()
        named = [(_shared(variable), indices) for variable, indices in parts]
        rows = [RowsRef(spec.ps, spec.key, indices) for spec, indices in named]
        with _named(*[spec for spec, _ in named]):
            return self._pull((), rows)

    async def read_rows_async(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        raise _not_here(*[variable for variable, _ in parts])

    async def read_many_async(
        self, variables: Sequence[VariableHandle]
    ) -> list[np.ndarray]:
        raise _not_here(*variables)

    def update_many(self, updates: Sequence[StorageUpdate]) -> None:
        """Queues updates. They are applied with the next read or at the end of the
        step, together with all other waiting updates: each server applies all of its
        updates or none."""
        if not updates:
            return
        for variable, *_ in updates:
            _shared(variable)
        # One lock for both: parts are numbered in the order in which they leave.
        with self._lock:
            self._waiting.add(updates)
            # Bounded, so a loop of a million updates without reads does not fill the
            # memory.
            if self._waiting.is_full:
                self._push()

    def bind(self, call: GradientCall) -> None:
        """Sends the tree of an optimizer to the servers, and waits until they have it.
        Each run does so; servers that have the tree answer at once."""
        bind(self._ask, call).result()

    async def update_many_async(self, updates: Sequence[StorageUpdate]) -> None:
        raise _not_here(*[variable for variable, *_ in updates])

    def _pull(
        self, refs: Sequence[Ref], rows: Sequence[RowsRef] = ()
    ) -> list[np.ndarray]:
        clocks: Clocks = {}
        with self._noting(Phase.PULL):
            values = self._ask(lambda client: client.pull(refs, rows, clocks=clocks))
        # The first read of each server counts: staleness is that of the oldest value.
        for server, clock in clocks.items():
            self._read_at.setdefault(server, clock)
        return values

    def _push(self) -> None:
        with self._lock:
            if self._waiting:
                self._push_part()

    def _push_part(self) -> None:
        # Counted before anything can fail, as a part that may have arrived must not
        # share its number with another.
        part, self._part = self._part, self._part + 1
        specs = self._waiting.specs
        updates, names = self._waiting.take()
        # Compared before it is sent: what differs must not be applied.
        before = self._done_before().get(part)
        if before is not None:
            require_same(self._run.step, before, names)
        run = self._run
        clocks: Clocks = {}
        wires = self._waiting.wires
        sent, lent = self._encoding.encoded(run.step, updates, wires)
        is_sent = False
        try:
            with _named(*specs), self._noting(Phase.PUSH):
                self._ask(
                    lambda client: client.push_part(
                        run, part, names, sent, clocks=clocks
                    )
                )
            is_sent = True
        finally:
            # Whatever ends the wait: a residual that is not settled is lost.
            self._encoding.residuals.settle(lent, is_sent=is_sent)
        self._acknowledged(clocks)

    def _acknowledged(self, clocks: Clocks) -> None:
        """Records the age of the values: how many pushes of other steps each server has
        applied since the first read there. Skips a server whose backup has taken over,
        because the backup counts differently."""
        for server, clock in clocks.items():
            # The clock counts all pushes of the server: less this one, and less those
            # of this step.
            others = clock - 1 - self._own[server] - self._read_at.get(server, clock)
            if others >= 0:
                self._notes.aged(server, others)
            self._own[server] += 1

    @contextmanager
    def _noting(self, phase: Phase) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._notes.spent(phase, began, self._clock())

    def _done_before(self) -> dict[int, tuple[str, ...]]:
        """Returns the names of the updates that earlier runs have pushed, by part. From
        then on the servers accept no push of these earlier runs."""
        # The first attempt has no earlier run, so it saves the round trip.
        if self._run.attempt == 1:
            return {}
        if self._before is None:
            self._before = self._ask(
                lambda client: asyncio.ensure_future(client.applied_parts(self._run))
            )
        return self._before


def bind(ask: Asking, call: GradientCall) -> concurrent.futures.Future[None]:
    """Sends the tree of an optimizer to the parameter servers; returns a future that is
    done when all servers have traced the tree.

    Raises:
        ValueError: The tree cannot be encoded; says why.
    """
    number, data = call.optimizer.id, encoded(call)
    return ask.later(lambda client: asyncio.ensure_future(client.bind(number, data)))


def _hand_over(answer: concurrent.futures.Future[T], future: asyncio.Future[T]) -> None:
    if future.cancelled():
        answer.set_exception(concurrent.futures.CancelledError())
    elif (error := future.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(future.result())


def _shared(variable: VariableHandle) -> VariableSpec:
    if variable.spec.ps == LOCAL:
        raise not_shared("an eager step function uses", variable.spec)
    return variable.spec


@contextmanager
def _named(*specs: VariableSpec) -> Iterator[None]:
    """Adds the names of the variables to errors of a parameter server, which knows
    variables by number alone."""
    try:
        yield
    except NotFoundError as error:
        raise NotFoundError(f"{', '.join(map(str, specs))}: {error}") from error


def _not_here(*variables: VariableHandle) -> RuntimeError:
    names = ", ".join([str(variable.spec) for variable in variables])
    return RuntimeError(
        f"{names}: a step is not a coroutine: use the blocking forms in it"
    )
