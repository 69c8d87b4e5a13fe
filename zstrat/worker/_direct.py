"""The home of variables while an eager step runs: each read and update is a request.

An eager step has no plan, so it talks to the parameter servers as it goes, one blocking
round trip at a time. Its updates are parts 0, 1, 2, … of one step, so that a step that
is tried again is still applied once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, final

from zstrat.errors import NotFoundError
from zstrat.program import not_shared
from zstrat.ps import PsUpdate, Ref, RowsRef
from zstrat.variables import LOCAL, encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zstrat.ps import PsClient
    from zstrat.variables import GradientCall, Optimizer, Variable, VariableSpec
    from zstrat.wire import UpdateOp

T = TypeVar("T")
Ask = Callable[[Callable[["PsClient"], "asyncio.Future[T]"]], T]


class Asking:
    """Starts requests on the loop for another thread, and waits for their outcome."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, client: PsClient, timeout: float
    ) -> None:
        self._loop, self._client, self._timeout = loop, client, timeout

    def __call__(self, start: Callable[[PsClient], asyncio.Future[T]]) -> T:
        """Blocks until the request has its outcome.

        Raises:
            TimeoutError: It had none; the links' own deadlines come first.
        """
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._begin, start, answer)
        return answer.result(self._timeout)

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
    """A `zstrat.variables.Home` for one run of one eager step.

    Args:
        low_water: All steps below it are over.
    """

    def __init__(self, ask: Asking, step: int, low_water: int) -> None:
        self._ask: Final = ask
        self._step, self._low_water = step, low_water
        self._part = 0

    def read(self, variable: Variable) -> np.ndarray:
        return self.read_many([variable])[0]

    def read_many(self, variables: Sequence[Variable]) -> list[np.ndarray]:
        """One request per server."""
        specs = [_shared(variable) for variable in variables]
        refs = [Ref(spec.ps, spec.key) for spec in specs]
        with _named(*specs):
            return self._ask(lambda client: client.pull(refs))

    def read_rows(
        self, parts: Sequence[tuple[Variable, np.ndarray]]
    ) -> list[np.ndarray]:
        """Rows ``[n, ...]`` of each variable at its indices ``[n]``; one request per
        server.

        Raises:
            InvalidArgumentError: A row is not there.
        """
        named = [(_shared(variable), indices) for variable, indices in parts]
        rows = [RowsRef(spec.ps, spec.key, indices) for spec, indices in named]
        with _named(*[spec for spec, _ in named]):
            return self._ask(lambda client: client.pull((), rows))

    async def read_rows_async(
        self, parts: Sequence[tuple[Variable, np.ndarray]]
    ) -> list[np.ndarray]:
        raise _not_here(*[variable for variable, _ in parts])

    async def read_async(self, variable: Variable) -> np.ndarray:
        raise _not_here(variable)

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[np.ndarray, ...],
        optimizer: Optimizer | None,
    ) -> None:
        self.update_many([(variable, op, operands, optimizer)])

    def update_many(
        self,
        updates: Sequence[
            tuple[Variable, UpdateOp, tuple[np.ndarray, ...], Optimizer | None]
        ],
    ) -> None:
        """Applies all in one request per server; on each one all of its own or none."""
        part, self._part = self._part, self._part + 1
        pushed = [
            _update(_shared(variable), op, operands, optimizer)
            for variable, op, operands, optimizer in updates
        ]
        with _named(*[variable.spec for variable, *_ in updates]):
            self._ask(
                lambda client: client.push(self._step, part, self._low_water, pushed)
            )

    def bind(self, call: GradientCall) -> None:
        """See `bind`; each run asks, and servers that know it answer at once."""
        bind(self._ask, call)

    async def update_many_async(
        self,
        updates: Sequence[
            tuple[Variable, UpdateOp, tuple[np.ndarray, ...], Optimizer | None]
        ],
    ) -> None:
        raise _not_here(*[variable for variable, *_ in updates])

    async def update_async(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[np.ndarray, ...],
        optimizer: Optimizer | None,
    ) -> None:
        raise _not_here(variable)


def bind(ask: Asking, call: GradientCall) -> None:
    """Tells the parameter servers of the tree of an optimizer; blocks.

    Raises:
        ValueError: It cannot be told, or a server refuses it; says why.
    """
    number, data = call.optimizer.id, encoded(call)
    ask(lambda client: asyncio.ensure_future(client.bind(number, data)))


def _hand_over(answer: concurrent.futures.Future[T], future: asyncio.Future[T]) -> None:
    if future.cancelled():
        answer.set_exception(concurrent.futures.CancelledError())
    elif (error := future.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(future.result())


def _shared(variable: Variable) -> VariableSpec:
    if variable.spec.ps == LOCAL:
        raise not_shared("an eager step function", variable.spec)
    return variable.spec


def _update(
    spec: VariableSpec,
    op: UpdateOp,
    operands: tuple[np.ndarray, ...],
    optimizer: Optimizer | None,
) -> PsUpdate:
    rule = 0 if optimizer is None else optimizer.id
    return PsUpdate(spec.ps, spec.key, op, rule, operands)


@contextmanager
def _named(*specs: VariableSpec) -> Iterator[None]:
    """A ps knows what it does not hold by its number alone."""
    try:
        yield
    except NotFoundError as error:
        raise NotFoundError(f"{', '.join(map(str, specs))}: {error}") from error


def _not_here(*variables: Variable) -> RuntimeError:
    names = ", ".join([str(variable.spec) for variable in variables])
    return RuntimeError(
        f"{names}: a step is no coroutine: use the blocking forms in it"
    )
