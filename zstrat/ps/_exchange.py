"""A push and the pull behind it in one message: a training step of a worker.

Means what a `Push` followed by a `PullRows` means, and is no third thing: the pull
reads what the push wrote, a push that is refused or was applied before does not keep
the pull from being answered, and a pull that is refused leaves what was pushed. Only,
nobody comes in between, because both parts have one turn.

Decides without I/O: either part may have to be computed elsewhere, and then the next
one begins when that was done.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast, final

from zstrat.errors import InvalidArgumentError, to_wire
from zstrat.wire import Again, Exchange, Exchanged, Pulled, Push, Pushed

from ._requests import PendingRequest, pulled, pushed
from .store._lookups import RowsPlan
from .store._plans import PushPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.wire import PlainTree

    from .store._fold import Fold
    from .store._store import Store


@final
class Exchanges:
    """Serves the exchanges of one parameter server, named ``task`` in errors.

    Args:
        check: Raises unless the session is the one that is open.
    """

    def __init__(self, task: str, store: Store, check: Callable[[int], None]) -> None:
        self._task, self._store, self._check = task, store, check
        self.refused = 0
        """Parts that failed."""

    def begin(
        self, message: Exchange, fold: Fold | None
    ) -> Exchanged | Again | PendingRequest:
        """Serves both parts, or says what has to be computed first; or neither, if the
        push has to come again.

        Raises:
            InvalidArgumentError: It cannot be cut into its parts; nothing has changed.
        """
        operands = len(message.arrays) - len(message.rows)
        if operands < 0:
            raise InvalidArgumentError(
                f"{self._task}: rows of {len(message.rows)} variables are wanted by "
                f"{len(message.arrays)} arrays of indices"
            )
        push = Push(
            message.session,
            message.step,
            message.part,
            message.low_water,
            message.updates,
            message.arrays[:operands],
        )
        try:
            done = pushed(self._store, push, fold)
        except Exception as error:  # goes to the caller, as the outcome of the push
            return self._pull(message, operands, False, self._refuse(error))
        if isinstance(done, PushPlan):
            return PendingRequest(
                done, partial(self._computed_push, message, operands, done)
            )
        if isinstance(done, Again):
            return done
        assert isinstance(done, Pushed)
        return self._pull(message, operands, done.applied, None)

    def _computed_push(
        self,
        message: Exchange,
        operands: int,
        plan: PushPlan,
        error: BaseException | None,
    ) -> Exchanged | PendingRequest:
        if error is None:
            try:
                self._store.commit(plan)
            except Exception as refused:  # goes to the caller
                error = refused
        told = None if error is None else self._refuse(error)
        return self._pull(message, operands, error is None, told)

    def _pull(
        self, message: Exchange, operands: int, applied: bool, push_error: PlainTree
    ) -> Exchanged | PendingRequest:
        reads, rows, arrays = message.reads, message.rows, message.arrays
        try:
            self._check(message.session)  # it may have ended while the push computed
            done = pulled(self._store, reads, rows, arrays[operands:])
        except Exception as error:  # goes to the caller, as the outcome of the pull
            return self._unread(applied, push_error, error)
        if isinstance(done, RowsPlan):
            then = partial(self._computed_pull, applied, push_error, done)
            return PendingRequest(done, then)
        assert isinstance(done, Pulled)
        return _exchanged(applied, push_error, done)

    def _computed_pull(
        self,
        applied: bool,
        push_error: PlainTree,
        plan: RowsPlan,
        error: BaseException | None,
    ) -> Exchanged:
        if error is None:
            try:
                done = self._store.commit(plan)
            except Exception as refused:  # goes to the caller
                error = refused
            else:
                assert isinstance(done, Pulled)
                return _exchanged(applied, push_error, done)
        return self._unread(applied, push_error, error)

    def _unread(
        self, applied: bool, push_error: PlainTree, error: BaseException
    ) -> Exchanged:
        clock = self._store.counts.pushes
        return Exchanged(applied, push_error, self._refuse(error), [], (), clock)

    def _refuse(self, error: BaseException) -> PlainTree:
        self.refused += 1
        return cast("PlainTree", to_wire(error))


def _exchanged(applied: bool, push_error: PlainTree, done: Pulled) -> Exchanged:
    return Exchanged(applied, push_error, None, done.versions, done.arrays, done.clock)
