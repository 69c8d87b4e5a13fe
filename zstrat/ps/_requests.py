"""What requests mean to the store: which names each one uses, and how it is begun.

Decides without I/O. What takes long is handed back as a `PendingRequest`: a plan that
any thread may compute, and how to go on when it has; whoever gets it sees to it that
nobody else uses the request's names meanwhile (`_serving`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, assert_never, cast, final

from zstrat.errors import InvalidArgumentError, to_wire
from zstrat.wire import (
    Again,
    BindOptimizer,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    Done,
    Exchange,
    Exchanged,
    InitializeVariables,
    Message,
    Pull,
    Pulled,
    PullRows,
    Push,
    Pushed,
    PushPart,
    Withdraw,
)

from .store._creating import CreatePlan
from .store._fold import Folded
from .store._ledger import UNNAMED
from .store._lookups import RowsPlan
from .store._plans import Plan, PushPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import numpy as np

    from zstrat.wire import PlainTree, Read, Update

    from .store._fold import Fold
    from .store._store import Store

INLINE: Final = 4 * 2**20
"""Bytes of arithmetic that the loop does by itself, as `work_of` counts them: 0.1 to
0.8 ms; a thread takes about 0.1 ms to wake and as much to report."""

Plain = (
    Push
    | PushPart
    | Pull
    | PullRows
    | CreateVariables
    | InitializeVariables
    | DeleteVariables
    | CreateOptimizer
    | BindOptimizer
    | Withdraw
)
"""Requests that are one thing to do; `Exchanges` have the one that is two."""

Stored = Exchange | Plain
"""Requests that use the store, and so take turns."""

Request = Stored | Folded

Outcome = Done | Pushed | Pulled | Again


class PendingRequest(NamedTuple):
    """``plan`` has to be computed elsewhere. ``then`` is to be called with None, or the
    error if that failed; it answers, has more to compute, or raises."""

    plan: Plan
    then: Callable[[BaseException | None], Message | PendingRequest]


def begin(store: Store, message: Plain, fold: Fold | None) -> Outcome | PendingRequest:
    """Serves a request on the spot, or says what has to be computed for it.

    Raises:
        ZstratError: It is refused; nothing has changed.
    """
    plan: Outcome | Plan
    match message:
        case Push():
            plan = pushed(store, message, fold)
        case PushPart():
            plan = _if_new(store, store.plan_part(message))
        case Pull(reads=reads):
            plan = pulled(store, reads, (), ())
        case PullRows(reads=reads, rows=rows, arrays=arrays):
            plan = pulled(store, reads, rows, arrays)
        case CreateVariables(variables=entries, arrays=arrays):
            plan = _at_once(store, store.plan_create(entries, arrays))
        case InitializeVariables(variables=initial, code=code):
            plan = store.plan_initialize(initial, code)
        case CreateOptimizer(optimizer=optimizer, name=name, code=code):
            plan = store.plan_optimizer(optimizer, name, code)
        case BindOptimizer(optimizer=optimizer, arrays=arrays):
            plan = store.plan_binding(optimizer, arrays)
        case DeleteVariables(keys=keys):
            store.delete(keys)
            return Done()
        case Withdraw(keys=keys, optimizers=optimizers):
            store.withdraw(keys, optimizers)
            return Done()
        case _:
            assert_never(message)
    if isinstance(plan, Outcome):
        return plan
    return PendingRequest(plan, partial(_computed, store, plan))


def pushed(store: Store, push: Push, fold: Fold | None) -> Outcome | PushPlan:
    """The answer to a push that takes no time, or what has to be computed."""
    if fold is not None:
        return store.push_folded(push, fold)
    return _if_new(store, store.plan_push(push))


def _if_new(store: Store, plan: Pushed | PushPlan) -> Outcome | PushPlan:
    return plan if isinstance(plan, Pushed) else _at_once(store, plan)


def pulled(
    store: Store,
    reads: Sequence[Read],
    rows: Sequence[int],
    indices: Sequence[np.ndarray],
) -> Outcome | RowsPlan:
    """The answer to a pull that takes no time, or what has to be computed."""
    if rows or indices:
        return _at_once(store, store.plan_rows(reads, rows, indices))
    return Pulled(*store.read(reads), store.counts.pushes)


def names_of(message: Request) -> list[Hashable]:
    """What a request uses: nobody else may use it at the same time."""
    match message:
        case Folded(message=push):
            return names_of(push)
        case Exchange(step=step, part=part, updates=updates):
            names = _names_of_push(0, step, part, updates)
            names += [read.key for read in message.reads]
            names += message.rows
            return names
        case Push(step=step, part=part, updates=updates, writer=writer):
            return _names_of_push(writer, step, part, updates)
        case PushPart(step=step, part=part, updates=updates):
            return _names_of_push(0, step, part, updates)
        case Pull(reads=reads):
            return [read.key for read in reads]
        case PullRows(reads=reads, rows=rows):
            return [*(read.key for read in reads), *rows]
        case CreateVariables(variables=entries):
            return [entry.key for entry in entries]
        case InitializeVariables(variables=initial):
            return [entry.key for entry in initial]
        case DeleteVariables(keys=keys):
            return list(keys)
        case CreateOptimizer(optimizer=optimizer) | BindOptimizer(optimizer=optimizer):
            return [("optimizer", optimizer)]
        case Withdraw(keys=keys, optimizers=optimizers):
            return [*keys, *(("optimizer", each) for each in optimizers)]
        case _:
            assert_never(message)


def _names_of_push(
    writer: int, step: int, part: int, updates: Sequence[Update]
) -> list[Hashable]:
    names: list[Hashable] = [update.key for update in updates]
    names += {("optimizer", u.optimizer) for u in updates if u.optimizer}
    # The same push that comes twice takes its turn behind itself, as a duplicate.
    if step != UNNAMED:
        names.append(("step", writer, step, part))
    return names


P = TypeVar("P", PushPlan, RowsPlan, CreatePlan)


def _at_once(store: Store, plan: P) -> Outcome | P:
    if plan.work > INLINE or (isinstance(plan, PushPlan) and not plan.is_compiled):
        return plan
    try:
        plan.compute()
    except BaseException:  # to the caller
        store.gave_up(plan)
        raise
    return store.commit(plan)


def _computed(store: Store, plan: Plan, error: BaseException | None) -> Outcome:
    if error is not None:
        raise error
    return store.commit(plan)


@final
class Exchanges:
    """Serves the exchanges of one parameter server, named ``task`` in errors: a push
    and the pull behind it in one message, a training step of a worker.

    An exchange means what a `Push` followed by a `PullRows` means, and is no third
    thing: the pull reads what the push wrote, a push that is refused or was applied
    before does not keep the pull from being answered, and a pull that is refused leaves
    what was pushed. Only, nobody comes in between, because both parts have one turn.
    Either part may have to be computed elsewhere, and then the next one begins when
    that was done.

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
