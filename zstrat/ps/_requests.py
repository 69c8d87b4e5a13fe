"""Serves requests to the store, and finds the names that each request uses.

Decides without I/O. A request is answered at once, or it is `Running`: a generator that
yields each job that another thread has to do before the request can continue, and
returns the answer. The caller (`_serving`) lets a thread do the job of a
`PendingRequest`, keeps the request's names locked meanwhile, and then calls `advance`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    NamedTuple,
    Protocol,
    TypeGuard,
    TypeVar,
)

import numpy as np

from zstrat.errors import InvalidArgumentError
from zstrat.wire import (
    Again,
    AskTables,
    BindOptimizer,
    CloseRound,
    Contribute,
    CreateOptimizer,
    CreateTables,
    CreateVariables,
    DeleteVariables,
    Done,
    Exchange,
    Exchanged,
    InitializeVariables,
    Merged,
    Pull,
    Pulled,
    PulledRound,
    PullMerged,
    PullRound,
    PullRows,
    PullTable,
    Push,
    Pushed,
    PushPart,
    UpdateOp,
    Withdraw,
    is_keys,
)

from .store._creating import CreatePlan, create_plan, initialize_plan, tables_plan
from .store._decoding import Decoding, ReplyEncoding, is_coded, wants_codec
from .store._fold import Folded
from .store._ledger import UNNAMED, plain_push
from .store._lookups import RowsPlan
from .store._plan import ReadPlan, StorePlan
from .store._plans import PushPlan, push_plan
from .store._rounds import merged_push, updates_of
from .store._store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.wire import Message, PlainTree, Read

    from .store._decoding import CodedMessage
    from .store._fold import Fold
    from .store._plans import Plan

INLINE: Final = 4 * 2**20
"""The most bytes of arithmetic, as `work_of` estimates them, that the event loop
computes by itself: they take 0.1 to 0.8 ms. A thread takes about 0.1 ms to wake and as
much to report."""


class StoreRequest(Protocol):
    """A request that uses the store, and so takes its turn."""

    @property
    def session(self) -> int: ...


Request = StoreRequest | Folded

_UPDATES: Final = (Push, PushPart)
_READS: Final = (Pull, PullRows)
_SIZED: Final = (RowsPlan, ReadPlan, CreatePlan)


T_co = TypeVar("T_co", covariant=True)
Running = Generator[Callable[[], None], None, T_co]
"""A request that is being served: a generator that yields each job which any thread may
do for it, and returns the answer."""


class PendingRequest(NamedTuple, Generic[T_co]):
    """A request whose ``job`` has to be done before the next call of `advance`."""

    job: Callable[[], None]
    running: Running[T_co]


def advance(
    running: Running[T_co], error: BaseException | None = None
) -> T_co | PendingRequest[T_co]:
    """Serves a request until it is answered, or another thread has to do a job.

    Args:
        error: The error with which its last job failed, if any.

    Raises:
        ZstratError: The request is refused.
    """
    try:
        job = next(running) if error is None else running.throw(error)
    except StopIteration as end:
        answer: T_co = end.value
        return answer
    return PendingRequest(job, running)


def is_of_store(message: Message) -> TypeGuard[StoreRequest]:
    """Returns whether the store serves a request. A pull that may have to wait for a
    round is not one (`RoundRequests`)."""
    return type(message) in _OF_STORE


def serve(store: Store, message: StoreRequest) -> Message | PendingRequest[Message]:
    """Serves a request that needs a single action; `exchange` serves the one of two.

    Raises:
        ZstratError: It is refused; nothing has changed.
    """
    # Formats first: the store and its log know plain arrays only.
    if isinstance(message, _UPDATES) and is_coded(message.updates):
        return advance(_decoded(store, message))
    if isinstance(message, _READS) and wants_codec(message.reads):
        return advance(_encoded(store, message))
    begun = OPERATIONS[type(message)].begin(store, message)
    if isinstance(begun, Generator):
        return advance(begun)
    if not isinstance(begun, StorePlan):
        return begun
    # Most requests are short, and a generator for one would take a microsecond.
    if compute_short(store, begun):
        return store.commit(begun)
    return advance(_complete(store, begun))


def _complete(store: Store, plan: Plan) -> Running[Message]:
    yield from computed(store, plan)
    return store.commit(plan)


def decode_updates(store: Store, message: CodedMessage) -> Running[CodedMessage]:
    """Returns the message with all gradients decoded to plain arrays.

    Raises:
        InvalidArgumentError, NotFoundError: As `Decoding.compute`.
    """
    decoding = Decoding(message.updates, message.arrays, store.variables)
    yield from _done(decoding.compute, decoding.work)
    return decoding.message(message)


def _decoded(store: Store, message: Push | PushPart) -> Running[Message]:
    plain = yield from decode_updates(store, message)
    if isinstance(plain, PushPart):
        begun = store.plan_part(plain)
    else:
        begun = store.plan_push(plain)
    if isinstance(begun, Pushed):
        return begun
    return (yield from _complete(store, begun))


def _encoded(store: Store, message: Pull | PullRows) -> Running[Message]:
    if isinstance(message, Pull):
        return (yield from pull(store, message.reads, (), ()))
    rows, arrays, sets = message.rows, message.arrays, message.sets
    return (yield from pull(store, message.reads, rows, arrays, sets))


def compute_short(store: Store, plan: Plan) -> bool:
    """Computes a plan if it takes no longer than waking a thread (`INLINE` bytes);
    returns whether it has done so."""
    if isinstance(plan, PushPlan):
        if not plan.is_short(INLINE):
            return False
    elif not isinstance(plan, _SIZED) or plan.work > INLINE:
        # Plans that do not know their work may compile, or run shipped code.
        return False
    try:
        plan.compute()
    except BaseException:  # to the caller
        # What it had written is lost, which the backup cannot know.
        store.gave_up(plan)
        raise
    return True


def computed(store: Store, plan: Plan) -> Running[None]:
    """Computes a plan, on the thread unless it is short."""
    if compute_short(store, plan):
        return
    try:
        yield plan.compute
    except BaseException:  # to the caller
        # Before any answer leaves: the log has to diverge.
        store.gave_up(plan)
        raise


def _done(job: Callable[[], None], work: int) -> Running[None]:
    """Does a job, on the thread unless it moves few bytes (``work``)."""
    if work <= INLINE:
        job()
    else:
        yield job


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
    push = plain_push(message, arrays[:operands])
    applied, push_error = False, None
    try:
        if is_coded(push.updates):
            push = yield from decode_updates(store, push)
        pushed: Message | PushPlan
        if fold is None:
            pushed = store.plan_push(push)
        else:
            pushed = store.push_folded(push, fold)
        if isinstance(pushed, PushPlan):
            yield from computed(store, pushed)
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
        yield from computed(store, pulled)
        pulled = store.commit(pulled)
    assert isinstance(pulled, Pulled)
    if wants_codec(reads):
        encoding = ReplyEncoding(store.variables.task, reads, pulled)
        yield from _done(encoding.compute, encoding.nbytes)
        pulled = replace(pulled, arrays=encoding.arrays)
    return pulled


def _pulled(
    store: Store,
    reads: Sequence[Read],
    rows: Sequence[int],
    arrays: Sequence[np.ndarray],
    sets: Sequence[int],
) -> Message | RowsPlan:
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


def _contribute(store: Store, message: Contribute) -> Running[Message]:
    generation = store.variables.generation
    if is_coded(message.updates):
        message = yield from decode_updates(store, message)
        # The thread may have decoded it, and the session ended meanwhile.
        store.require_generation(generation)
    store.contribute(message)
    return Done()


def close_round(store: Store, message: CloseRound) -> Running[Done]:
    """Applies the merged gradients of a round; changes nothing if the round was closed
    before. A backup replays rounds with this function, too.

    Raises:
        ProtocolError: An earlier round is open.
        NotFoundError: The contribution of a member is not here.
        ZstratError: The merged update is refused; the round stays open.
    """
    merging = store.rounds.merging(message.order)
    # The order came again: its answer was lost, or the program before had sent it.
    if merging is None:
        return Done()
    yield from _done(merging.compute, merging.work)
    push = merged_push(message, merging)
    # Not `Store.plan_push`: the ledger knows a round by its members.
    plan = push_plan(push, store.variables, store.engine)
    yield from computed(store, plan)
    store.commit_round(message, plan)
    return Done()


def _merge(store: Store, message: PullMerged) -> Running[Merged]:
    merging, optimizer = store.rounds.merging(message.order), message.order.optimizer
    if merging is None:
        return Merged(0, [], ())
    yield merging.compute
    trees: list[np.ndarray] = []
    if message.trees:
        known = store.engine.get(optimizer).bindings.encoded
        trees = [np.frombuffer(data, np.uint8) for data, _ in known]
    updates, arrays = updates_of(optimizer, merging.merged)
    return Merged(len(trees), updates, (*trees, *arrays))


def _pull_round(store: Store, message: PullRound) -> Running[PulledRound]:
    numbers = [store.rounds.number(each.optimizer) for each in message.after]
    pulled = yield from pull(store, message.reads, message.rows, message.arrays)
    return PulledRound(numbers, pulled.versions, pulled.arrays, pulled.clock)


def names_of(store: Store, message: Request) -> list[Hashable]:
    """Returns the names (variable keys, steps, optimizers) that a request uses. No
    other request may use them while it is served."""
    if isinstance(message, Folded):
        message = message.message
    if isinstance(message, Exchange):
        # Names may repeat: a ticket takes each once.
        return [*_names_of_push(store, message), *_names_of_rows(store, message)]
    return OPERATIONS[type(message)].names(store, message)


def _names_of_push(store: Store, message: Push | PushPart | Exchange) -> list[Hashable]:
    writer = message.writer if isinstance(message, Push) else 0
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


def _names_of_rows(store: Store, message: PullRows | Exchange) -> list[Hashable]:
    keys = _keys_of_sets(message)
    return [*(read.key for read in message.reads), *message.rows, *keys]


def _names_of_optimizer(
    store: Store, message: CreateOptimizer | BindOptimizer
) -> list[Hashable]:
    # Not the keys of the tree: it is traced without values, and binds those that are
    # there.
    return [("optimizer", message.optimizer)]


def _names_of_variables(
    store: Store, message: CreateVariables | InitializeVariables
) -> list[Hashable]:
    return [entry.key for entry in message.variables]


def _names_of_round(store: Store, message: CloseRound | PullMerged) -> list[Hashable]:
    return store.rounds.keys(message.order)


def _pull(store: Store, message: Pull) -> Message:
    return Pulled(*store.read(message.reads), store.counts.pushes)


def _pull_rows(store: Store, message: PullRows) -> Message | RowsPlan:
    return _pulled(store, message.reads, message.rows, message.arrays, message.sets)


def _delete(store: Store, message: DeleteVariables) -> Done:
    store.delete(message.keys, again=message.again)
    return Done()


def _withdraw(store: Store, message: Withdraw) -> Done:
    store.withdraw(message.keys, message.optimizers)
    return Done()


class Operation(NamedTuple):
    """How a request of the store is served."""

    begin: Callable[[Store, Any], Message | Plan | Running[Message]]
    """Answers a request that takes no time, or returns what has to be computed, or a
    generator that serves it; raises ZstratError if it is refused, and nothing has
    changed."""
    names: Callable[[Store, Any], list[Hashable]]
    """Returns the names that the request uses (`names_of`)."""


OPERATIONS: Final[dict[type, Operation]] = {
    Push: Operation(Store.plan_push, _names_of_push),
    PushPart: Operation(Store.plan_part, _names_of_push),
    Pull: Operation(_pull, lambda _, pull: [read.key for read in pull.reads]),
    PullRows: Operation(_pull_rows, _names_of_rows),
    PullTable: Operation(Store.plan_items, lambda _, pull: [pull.key]),
    AskTables: Operation(
        lambda store, asked: store.table_sizes(asked.keys),
        lambda _, asked: list(asked.keys),
    ),
    CreateTables: Operation(
        lambda store, new: tables_plan(
            new.tables, new.code, store.engine.load_code, store.variables, new.session
        ),
        lambda _, new: [entry.key for entry in new.tables],
    ),
    CreateVariables: Operation(
        lambda store, new: create_plan(new.variables, new.arrays, store.variables),
        _names_of_variables,
    ),
    InitializeVariables: Operation(
        lambda store, new: initialize_plan(
            new.variables, new.code, store.engine.load_code, store.variables
        ),
        _names_of_variables,
    ),
    CreateOptimizer: Operation(
        lambda store, new: store.plan_optimizer(new.optimizer, new.name, new.code),
        _names_of_optimizer,
    ),
    BindOptimizer: Operation(
        lambda store, tree: store.plan_binding(tree.optimizer, tree.arrays),
        _names_of_optimizer,
    ),
    Contribute: Operation(_contribute, lambda _, given: []),  # changes no variable
    CloseRound: Operation(close_round, _names_of_round),
    PullMerged: Operation(_merge, _names_of_round),
    PullRound: Operation(
        _pull_round, lambda _, pull: [*(read.key for read in pull.reads), *pull.rows]
    ),
    DeleteVariables: Operation(_delete, lambda _, deleted: list(deleted.keys)),
    Withdraw: Operation(
        _withdraw,
        lambda _, dropped: [
            *dropped.keys,
            *(("optimizer", each) for each in dropped.optimizers),
        ],
    ),
}
"""All requests of the store but `Exchange`. One more is a row here; its class says who
may send it, and that of its answer whether it is a read (`zstrat.wire`)."""

_OF_STORE: Final = frozenset({*OPERATIONS, Exchange}) - {PullRound}
