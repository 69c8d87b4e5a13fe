"""What every worker is to have before it runs closures: per-worker resources.

A *record* says how to build one (shipped code, its arguments) and keeps one value per
worker, which says how that went. It outlives connections: whenever a worker (re)joins,
all records are built there again, from the beginning, before its next closure.

The record does not know the handle that the user holds; when that is dropped, the
record's number goes to the dispatcher, which has it forgotten everywhere.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from zstrat.errors import ClosureAbortedError, ClosureInputError

from ._values import RemoteValue, RemoteValueStatus, Result

if TYPE_CHECKING:
    from zstrat.wire import LayoutMessage

    from ._calls import Code, PickledArguments
    from ._engine import ClosureEngine

_numbers: Final = itertools.count(1)
READY: Final = RemoteValueStatus.READY
NOT_READY: Final = RemoteValueStatus.NOT_READY


class Record:
    """How to build one resource, and how that went on each worker.

    The values change with the engine's lock held.
    """

    __slots__ = ("arguments", "layout", "maker", "name", "number", "purpose", "values")

    def __init__(
        self,
        engine: ClosureEngine,
        workers: int,
        *,
        name: str,
        purpose: str,
        maker: Code,
        arguments: PickledArguments | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.name, self.purpose = name, purpose
        self.maker, self.arguments = maker, arguments
        self.layout: LayoutMessage | None = None
        """Of an element (or of the value), once a worker has told."""
        self.values = tuple(
            RemoteValue(engine, Result(name, None)) for _ in range(workers)
        )

    @property
    def is_known(self) -> bool:
        """A worker has built it and told what it looks like."""
        return self.layout is not None

    @property
    def is_settled(self) -> bool:
        """Nobody is building it."""
        return all(value.state is not NOT_READY for value in self.values)

    @property
    def failure(self) -> Exception | None:
        """What the first worker says that could not build it, once nobody builds it any
        more. A worker that is away says nothing, and is not waited for."""
        if not self.is_settled:
            return None
        errors = (value.error for value in self.values if value.state is READY)
        return next((error for error in errors if error is not None), None)

    def begin(self, worker: int) -> None:
        """The worker starts to build it."""
        self.values[worker]._begin_again()

    def built(self, worker: int, layout: LayoutMessage) -> None:
        self.layout = self.layout or layout
        self.values[worker]._settle_built()

    def failed(self, worker: int, task: str, error: Exception) -> ClosureInputError:
        """Building raised; returns what closures get that want to use it there."""
        wrapped = ClosureInputError(f"{self.name} could not be built on {task}", error)
        wrapped.__cause__ = wrapped.original_exception
        self.values[worker]._settle_error(wrapped)
        return wrapped

    def ended(self, cause: str) -> None:
        """It is not built any more where it is not there yet."""
        for value in self.values:
            if value.state is NOT_READY:
                value._abort(ClosureAbortedError(f"{self.name} is not built: {cause}"))

    def aborted(self, worker: int, task: str, reason: str) -> None:
        """The worker is gone, or not there yet."""
        self.values[worker]._abort(
            ClosureAbortedError(
                f"{self.name} is not on {task} ({reason}); it is built when "
                "that returns"
            )
        )
