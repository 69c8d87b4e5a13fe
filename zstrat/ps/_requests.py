"""Serves requests to the store, and finds the names that each request uses.

Decides without I/O. A request is answered at once, or it is `Running`: a generator that
yields each plan that another thread has to compute before the request can continue, and
returns the answer. The caller (`_serving`) lets a thread compute the plan of a
`PendingRequest`, keeps the request's names locked meanwhile, and then calls `advance`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Final,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    assert_never,
)

from zstrat.errors import InvalidArgumentError
from zstrat.wire import (
    Again,
    AskTables,
    BindOptimizer,
    CreateOptimizer,
    CreateTables,
    CreateVariables,
    DeleteVariables,
    Done,
    Exchange,
    Exchanged,
    InitializeVariables,
    Pull,
    Pulled,
    PullRows,
    PullTable,
    Push,
    Pushed,
    PushPart,
    TableSizes,
    UpdateOp,
    Withdraw,
    is_keys,
)

from .store._creating import CreatePlan
from .store._decoding import Decoding, ReplyEncoding, is_coded, wants_codec
from .store._fold import Folded
from .store._ledger import UNNAMED
from .store._lookups import RowsPlan, TableItems
from .store._plans import PushPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import numpy as np

    from zstrat.wire import PlainTree, Read

    from .store._decoding import CodedMessage
    from .store._fold import Fold
    from .store._plans import Plan
    from .store._store import Store

INLINE: Final = 4 * 2**20
"""The most bytes of arithmetic, as `work_of` estimates them, that the event loop
computes by itself: they take 0.1 to 0.8 ms. A thread takes about 0.1 ms to wake and as
much to report."""

Plain = (
    Push
    | PushPart
    | Pull
    | PullRows
    | PullTable
    | AskTables
    | CreateVariables
    | InitializeVariables
    | CreateTables
    | DeleteVariables
    | CreateOptimizer
    | BindOptimizer
    | Withdraw
)
"""Requests that are a single action; `exchange` serves a push and a pull in one
message."""

Stored = Exchange | Plain
"""Requests that use the store, and so wait for their turn."""

Request = Stored | Folded

Outcome = Done | Pushed | Pulled | TableSizes | Again
_OUTCOMES: Final = (Pulled, Pushed, Done, Again, TableSizes)
_SIZED: Final = (RowsPlan, TableItems, CreatePlan)


class Computation(Protocol):
    """A part of a request that any thread may compute."""

    def compute(self) -> None: ...


T_co = TypeVar("T_co", covariant=True)
Running = Generator[Computation, None, T_co]
"""A request that is being served: a generator that yields each computation it needs,
and returns the answer."""


class PendingRequest(NamedTuple, Generic[T_co]):
    """A request whose ``plan`` has to be computed before the next call of `advance`."""

    plan: Computation
    running: Running[T_co]


def advance(
    running: Running[T_co], error: BaseException | None = None
) -> T_co | PendingRequest[T_co]:
    """Serves a request until it is answered, or another thread has to compute a plan.

    Args:
        error: The error with which the computation of its last plan failed, if any.

    Raises:
        ZstratError: The request is refused.
    """
    try:
        plan = next(running) if error is None else running.throw(error)
    except StopIteration as end:
        answer: T_co = end.value
        return answer
    return PendingRequest(plan, running)


def serve(
    store: Store, message: Plain, fold: Fold | None
) -> Outcome | PendingRequest[Outcome]:
    """Serves a request that needs a single action.

    Raises:
        ZstratError: The request is refused; nothing has changed.
    """
    # Formats first: the store and its log know plain arrays only.
    if isinstance(message, Push | PushPart) and is_coded(message.updates):
        return advance(_decoded(store, message))
    if isinstance(message, Pull | PullRows) and wants_codec(message.reads):
        return advance(_encoded(store, message))
    begun = plan_request(store, message, fold)
    if isinstance(begun, _OUTCOMES):
        return begun
    # Most requests are short, and a generator for one would take a microsecond.
    if compute_short(store, begun, INLINE):
        return store.commit(begun)
    return advance(_complete(store, begun))


def _complete(store: Store, plan: Plan) -> Running[Outcome]:
    yield plan  # computed on the thread, with the names of the request held
    return store.commit(plan)


def decode_updates(store: Store, message: CodedMessage) -> Running[CodedMessage]:
    """Returns the message with all gradients decoded to plain arrays.

    Raises:
        InvalidArgumentError, NotFoundError: As `Decoding.compute`.
    """
    decoding = Decoding(message.updates, message.arrays, store.variables)
    if decoding.work <= INLINE:
        decoding.compute()
    else:
        yield decoding
    return decoding.message(message)


def _decoded(store: Store, message: Push | PushPart) -> Running[Outcome]:
    plain = yield from decode_updates(store, message)
    begun = plan_request(store, plain, None)
    if isinstance(begun, _OUTCOMES):
        return begun
    if not compute_short(store, begun, INLINE):
        yield begun
    return store.commit(begun)


def _encoded(store: Store, message: Pull | PullRows) -> Running[Outcome]:
    if isinstance(message, Pull):
        return (yield from pull(store, message.reads, (), ()))
    rows, arrays, sets = message.rows, message.arrays, message.sets
    return (yield from pull(store, message.reads, rows, arrays, sets))


def compute_short(store: Store, plan: Plan, limit: int) -> bool:
    """Computes a plan if it takes no longer than waking a thread (``limit`` bytes);
    returns whether it has done so."""
    if isinstance(plan, PushPlan):
        if not plan.is_short(limit):
            return False
    elif not isinstance(plan, _SIZED) or plan.work > limit:
        # Plans that do not know their work may compile, or run shipped code.
        return False
    try:
        plan.compute()
    except BaseException:  # to the caller
        # What it had written is lost, which the backup cannot know.
        store.gave_up(plan)
        raise
    return True


def plan_request(store: Store, message: Plain, fold: Fold | None) -> Outcome | Plan:
    """Returns the answer to a request that takes no time, or the plan that has to be
    computed for it.

    Raises:
        ZstratError: The request is refused; nothing has changed.
    """
    match message:
        case Push():
            return _pushed(store, message, fold)
        case PushPart():
            return store.plan_part(message)
        case Pull(reads=reads):
            return _pulled(store, reads, (), (), ())
        case PullRows(reads=reads, rows=rows, arrays=arrays, sets=sets):
            return _pulled(store, reads, rows, arrays, sets)
        case PullTable():
            return store.plan_items(message)
        case AskTables(keys=keys):
            return store.table_sizes(keys)
        case CreateTables(session=session, tables=tables, code=code):
            return store.plan_tables(tables, code, session)
        case CreateVariables(variables=entries, arrays=arrays):
            return store.plan_create(entries, arrays)
        case InitializeVariables(variables=initial, code=code):
            return store.plan_initialize(initial, code)
        case CreateOptimizer(optimizer=optimizer, name=name, code=code):
            return store.plan_optimizer(optimizer, name, code)
        case BindOptimizer(optimizer=optimizer, arrays=arrays):
            return store.plan_binding(optimizer, arrays)
        case DeleteVariables(keys=keys, again=again):
            store.delete(keys, again=again)
            return Done()
        case Withdraw(keys=keys, optimizers=optimizers):
            store.withdraw(keys, optimizers)
            return Done()
        case _:
            assert_never(message)


def exchange(
    store: Store,
    message: Exchange,
    fold: Fold | None,
    check: Callable[[int], None],
    refuse: Callable[[Exception], PlainTree],
) -> Running[Exchanged | Again]:
    """Serves a push and the pull after it in one message, a training step of a worker.

    An exchange means what a `Push` followed by a `PullRows` means, and is not a third
    thing: the pull reads what the push wrote, a push that is refused or was applied
    before does not keep the pull from being answered, and a pull that is refused leaves
    what was pushed. But no other request is served between the two parts. If the push
    has to be sent again, neither part is done.

    Args:
        check: Raises unless the session with this number is open.
        refuse: Counts a part that failed; returns the encoding of its error.

    Raises:
        InvalidArgumentError: The message cannot be divided into push and pull; nothing
            has changed.
    """
    reads, rows, arrays = message.reads, message.rows, message.arrays
    operands = len(arrays) - len(rows) - len(message.sets)
    if operands < 0:
        raise InvalidArgumentError(
            f"{store.variables.task}: rows of {len(rows)} variables and "
            f"{len(message.sets)} sets are wanted by {len(arrays)} arrays of indices "
            "and keys"
        )
    push = Push(
        message.session,
        message.step,
        message.part,
        message.low_water,
        message.updates,
        arrays[:operands],
        leases=message.leases,
    )
    applied, push_error = False, None
    try:
        if is_coded(push.updates):
            push = yield from decode_updates(store, push)
        pushed = _pushed(store, push, fold)
        if isinstance(pushed, PushPlan):
            if not compute_short(store, pushed, INLINE):
                yield pushed
            pushed = store.commit(pushed)
    except Exception as error:  # goes to the caller, as the outcome of the push
        push_error = refuse(error)  # the pull is answered all the same
    else:
        if isinstance(pushed, Again):
            return pushed
        assert isinstance(pushed, Pushed)
        applied = pushed.applied
    try:
        # The push may have been computed elsewhere, and the session ended meanwhile.
        check(message.session)
        asked = arrays[operands:]
        pulled = yield from pull(store, reads, rows, asked, message.sets)
    except Exception as error:  # goes to the caller, as the outcome of the pull
        clock = store.counts.pushes
        return Exchanged(applied, push_error, refuse(error), [], (), clock)
    versions, values, clock = pulled.versions, pulled.arrays, pulled.clock
    return Exchanged(applied, push_error, None, versions, values, clock)


def pull(
    store: Store,
    reads: Sequence[Read],
    rows: Sequence[int],
    arrays: Sequence[np.ndarray],
    sets: Sequence[int] = (),
) -> Running[Pulled]:
    """Serves a pull; ``arrays`` are the indices of ``rows`` and the keys of ``sets``.

    Raises:
        ZstratError: The pull is refused.
    """
    pulled = _pulled(store, reads, rows, arrays, sets)
    if isinstance(pulled, RowsPlan):
        if not compute_short(store, pulled, INLINE):
            yield pulled
        pulled = store.commit(pulled)
    assert isinstance(pulled, Pulled)
    if wants_codec(reads):
        encoding = ReplyEncoding(store.variables.task, reads, pulled)
        if encoding.nbytes > INLINE:
            yield encoding
        else:
            encoding.compute()
        pulled = replace(pulled, arrays=encoding.arrays)
    return pulled


def _pushed(store: Store, push: Push, fold: Fold | None) -> Outcome | PushPlan:
    return store.plan_push(push) if fold is None else store.push_folded(push, fold)


def _pulled(
    store: Store,
    reads: Sequence[Read],
    rows: Sequence[int],
    arrays: Sequence[np.ndarray],
    sets: Sequence[int],
) -> Outcome | RowsPlan:
    keys: Sequence[np.ndarray] = ()
    if sets:
        # Not validated yet: a slice of too few arrays would take indices for keys.
        if len(arrays) < len(sets):
            raise InvalidArgumentError(
                f"{store.variables.task}: {len(sets)} sets are wanted by {len(arrays)} "
                "arrays of keys"
            )
        arrays, keys = arrays[: -len(sets)], arrays[-len(sets) :]
    # Arrays without rows, too: `plan_rows` has the error for them.
    if rows or arrays:
        return store.plan_rows(reads, rows, arrays, sets, keys)
    return Pulled(*store.read(reads, sets, keys), store.counts.pushes)


def names_of(message: Request) -> list[Hashable]:
    """Returns the names (variable keys, steps, optimizers) that a request uses. No
    other request may use them while it is served."""
    match message:
        case Folded(message=push):
            return names_of(push)
        case Exchange():
            names = _names_of_push(0, message)
            # Names may repeat: a ticket takes each once.
            names += [read.key for read in message.reads]
            names += message.rows
            names += _keys_of_sets(message)
            return names
        case Push(writer=writer):
            return _names_of_push(writer, message)
        case PushPart():
            return _names_of_push(0, message)
        case Pull(reads=reads):
            return [read.key for read in reads]
        case PullRows(reads=reads, rows=rows):
            keys = _keys_of_sets(message)
            return [*(read.key for read in reads), *rows, *keys]
        case PullTable(key=key):
            return [key]
        case CreateTables(tables=tables):
            return [entry.key for entry in tables]
        case CreateVariables(variables=entries):
            return [entry.key for entry in entries]
        case InitializeVariables(variables=initial):
            return [entry.key for entry in initial]
        case DeleteVariables(keys=keys) | AskTables(keys=keys):
            return list(keys)
        case CreateOptimizer(optimizer=optimizer) | BindOptimizer(optimizer=optimizer):
            # Not the keys of the tree: it is traced without values, and binds those
            # that are there.
            return [("optimizer", optimizer)]
        case Withdraw(keys=keys, optimizers=optimizers):
            return [*keys, *(("optimizer", each) for each in optimizers)]
        case _:
            assert_never(message)


def _names_of_push(writer: int, message: Push | PushPart | Exchange) -> list[Hashable]:
    step, updates = message.step, message.updates
    names: list[Hashable] = [update.key for update in updates]
    # An optimizer's programs are used by one push at a time, whatever variables it has.
    names += {("optimizer", u.optimizer) for u in updates if u.optimizer}
    if any([update.op == UpdateOp.OPTIMIZE_SET for update in updates]):  # noqa: C419 (a generator is slower)
        at = 0
        for update in updates:
            if update.op == UpdateOp.OPTIMIZE_SET:
                names += _keys_of(message.arrays[at : at + 1])
            at += update.operands
    # The same push that comes twice takes its turn after itself, as a duplicate.
    # Pushes outside of steps are never duplicates, so nothing need wait for them.
    if step != UNNAMED:
        names.append(("step", writer, step, message.part))
    return names


def _keys_of_sets(message: Exchange | PullRows) -> list[int]:
    count = len(message.sets)
    return _keys_of(message.arrays[-count:]) if count else []


def _keys_of(arrays: Sequence[np.ndarray]) -> list[int]:
    """Returns the variable keys in arrays that name sets. Ignores malformed arrays,
    which `serve` refuses."""
    return [key for each in arrays if is_keys(each) for key in each.tolist()]
