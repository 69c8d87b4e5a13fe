"""Sequential replicas: one after the other, until all have come to the same place.

Each replica is a greenlet with a context of its own (what is current in it: replica,
recorder). It runs until it ends or *meets* the others, in replica order; when all have
come, what they meet for is done once, by the one who lets them run, and each goes on
with what it is given. So there is never more than one that runs, and the order is
always the same: names of variables and random numbers come out alike in every run.

They are no threads because jax's traces belong to a thread: turns may be taken in the
middle of one.

Law of the file: who waits is woken, with a value or by being ended; nothing is left
when a replica fails.

jax keeps its settings per thread, and sequential replicas share one: what one has set
when it lets the others run would be theirs, and left in an order that is not the
reverse of entering it would stay for ever. Names for profiles (`jax.named_scope`) are
put back for the others and for itself; of everything else jax offers no way to do so
that leaves no trace, and it is refused. Law of that: no setting is made but names.
"""

from __future__ import annotations

import contextvars
import operator
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import jax
from greenlet import GreenletExit, getcurrent, greenlet
from jax.extend import source_info_util

from zstrat.program.trace import current_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from contextlib import AbstractContextManager

_CONTEXTS: Final = {
    "jax_enable_x64": "jax.enable_x64",
    "jax_default_device": "jax.default_device",
    "jax_default_matmul_precision": "jax.default_matmul_precision",
    "jax_disable_jit": "jax.disable_jit",
    "jax_numpy_rank_promotion": "jax.numpy_rank_promotion",
    "jax_numpy_dtype_promotion": "jax.numpy_dtype_promotion",
    "jax_default_prng_impl": "jax.default_prng_impl",
    "jax_threefry_partitionable": "jax.threefry_partitionable",
    "jax_debug_nans": "jax.debug_nans",
    "jax_debug_infs": "jax.debug_infs",
    "jax_check_tracer_leaks": "jax.check_tracer_leaks",
    "jax_log_compiles": "jax.log_compiles",
    "jax_transfer_guard_host_to_device": "jax.transfer_guard",
    "jax_transfer_guard_device_to_device": "jax.transfer_guard",
    "jax_transfer_guard_device_to_host": "jax.transfer_guard",
}
"""Settings, and the context managers that make them."""

_read: Final = operator.attrgetter(*_CONTEXTS)


class JaxSettings:
    """The settings of this thread when this is made."""

    __slots__ = ("_mesh", "_names", "_values")

    def __init__(self) -> None:
        self._values = _read(jax.config)
        self._mesh = jax.sharding.get_abstract_mesh()
        self._names = source_info_util.current_name_stack()

    def require_unchanged(self, what: str) -> None:
        """Refuses to let others run under other settings.

        Raises:
            RuntimeError: One has been changed.
        """
        values = _read(jax.config)
        if values == self._values and jax.sharding.get_abstract_mesh() == self._mesh:
            return
        changed = [
            name
            for name, before, now in zip(
                _CONTEXTS.values(), self._values, values, strict=True
            )
            if before != now
        ]
        context = changed[0] if changed else "jax.set_mesh"
        raise RuntimeError(
            f"{what} inside `with {context}(...)`, in a replica function that runs "
            "sequentially with the others: jax keeps this setting per thread, so it "
            "would apply to them, too, and remain. Leave the context before and enter "
            "it again after, or enter it around strategy.run"
        )

    def names(self) -> AbstractContextManager[Any]:
        """While entered, the names for profiles are those of then."""
        context: AbstractContextManager[Any]
        context = source_info_util.set_name_stack(self._names)
        return context


class NeedsSequential(BaseException):
    """The function is none that one program could do for all replicas. No `Exception`:
    the function itself must not catch it."""


@dataclass(frozen=True, slots=True)
class ReplicaBarrier:
    """What one replica waits at a barrier for.

    ``key`` is the same for all that meet, ``words`` says it. ``join`` takes the values
    of all replicas and returns what each is given; that of replica 0 is called.
    ``handled`` is the error that the replica cleans up after, or handles, meanwhile.
    """

    key: Hashable
    words: str
    value: Any
    join: Callable[[Sequence[Any]], Sequence[Any]]
    handled: BaseException | None = field(default_factory=sys.exception)


class ReplicaFiber:
    """One replica of a sequential run, which its function waits in."""

    def __init__(self, number: int, body: Callable[[ReplicaFiber], Any]) -> None:
        self.number = number
        self.result: Any = None
        self.barrier: ReplicaBarrier | None = None
        """What it waits for, None if it has ended."""
        self._body = body
        self._is_over = False
        self._trace: object = None
        self._settings: JaxSettings | None = None
        self._greenlet = greenlet(self._run)
        # A context of its own: what is current in one replica is not in the others.
        self._greenlet.gr_context = contextvars.copy_context()

    @property
    def is_inside(self) -> bool:
        """Whether jax transforms what its function does now."""
        return current_trace() != self._trace

    def wait_at(self, barrier: ReplicaBarrier) -> Any:
        """Waits for the other replicas; returns what this one is given.

        Raises:
            RuntimeError: Inside a function that jax transforms, which cannot wait, or
                in a context that sets something in jax.
        """
        if self._is_over:
            # It cleans up, and nobody comes to meet it any more.
            raise GreenletExit
        if self.is_inside:
            raise RuntimeError(
                f"{barrier.words} inside a function that jax transforms (jax.grad, "
                "jax.jit, jax.lax.scan, ...), in a replica function that runs "
                "sequentially with the others: such a function cannot wait for them. "
                "Do it before or after that function"
            )
        parent, settings = getcurrent().parent, self._settings
        assert parent is not None
        assert settings is not None
        settings.require_unchanged(barrier.words)
        with settings.names():
            return parent.switch(barrier)

    def go_on(self, given: Any) -> None:
        """Lets it run to its end or the next barrier.

        Raises:
            BaseException: Whatever the replica function raises.
        """
        came = self._greenlet.switch(given)
        self.barrier = came if isinstance(came, ReplicaBarrier) else None

    def end(self) -> None:
        """Ends one that waits, or has not begun."""
        self._is_over = True
        self.barrier = None
        if not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def _run(self, _: Any) -> None:
        self._trace, self._settings = current_trace(), JaxSettings()
        current_fiber.set(self)
        self.result = self._body(self)


current_fiber: Final[ContextVar[ReplicaFiber | None]] = ContextVar(
    "zstrat_fiber", default=None
)
"""The fiber that this code runs in, if any. Set in the context of the fiber alone."""


def run_fibers(
    bodies: Sequence[Callable[[ReplicaFiber], Any]],
    during: Callable[[int], AbstractContextManager[Any]],
) -> list[Any]:
    """What the replicas return, in order.

    Args:
        bodies: One function for each replica.
        during: Entered while the replica of this number runs.

    Raises:
        RuntimeError: Not all replicas come to the same barriers.
        BaseException: Whatever one of them raises, or a barrier; all others are ended.
    """
    fibers = [ReplicaFiber(number, body) for number, body in enumerate(bodies)]
    given: Sequence[Any] = [None] * len(fibers)
    try:
        while True:
            for each, value in zip(fibers, given, strict=True):
                with during(each.number):
                    each.go_on(value)
            barriers = [each.barrier for each in fibers]
            if not any(barriers):
                return [each.result for each in fibers]
            came = _all_of(barriers)
            given = came[0].join([barrier.value for barrier in came])
    except BaseException as error:  # to the caller, when all have ended
        _end_all(fibers, during, error)
        raise


def _end_all(
    fibers: Sequence[ReplicaFiber],
    during: Callable[[int], AbstractContextManager[Any]],
    error: BaseException,
) -> None:
    """Ends all; what they raise while they clean up is noted at the error that is why.

    Raises:
        BaseException: One that is no `Exception`, such as an interrupt, when all have
            ended.
    """
    interrupt: BaseException | None = None
    for each in fibers:
        try:
            with during(each.number):
                each.end()
        except Exception as other:  # goes into the note
            error.add_note(
                f"replica {each.number}, which was ended for this, raised "
                f"{type(other).__name__} while it cleaned up: {other}"
            )
        except BaseException as other:  # to the caller, when all have ended
            interrupt = interrupt or other
    if interrupt is not None:
        raise interrupt from error


def _all_of(barriers: Sequence[ReplicaBarrier | None]) -> list[ReplicaBarrier]:
    """The barriers, if all replicas came to the same one.

    Raises:
        RuntimeError: Says who did not. Its cause is the error that a replica cleans up
            after: one that fails does other things than those that do not.
    """
    came = [barrier for barrier in barriers if barrier is not None]
    difference = _difference(barriers, came)
    if difference is None:
        return came
    for barrier in came:
        if barrier.handled is not None:
            raise RuntimeError(difference) from barrier.handled
    raise RuntimeError(difference)


def _difference(
    barriers: Sequence[ReplicaBarrier | None], came: Sequence[ReplicaBarrier]
) -> str | None:
    """Says which replica came to another barrier than replica 0, or to none; None: all
    came to the same."""
    if len(came) < len(barriers):
        waiting = next(n for n, barrier in enumerate(barriers) if barrier is not None)
        ended = next(n for n, barrier in enumerate(barriers) if barrier is None)
        return (
            "Some replicas made a different number of merge_call() calls. Replica "
            f"{ended} has returned, and replica {waiting} waits in {came[0].words}: "
            "all replicas do the same things together (merge_call, all_reduce, "
            "all_gather, updates of variables that are aggregated)"
        )
    for number, barrier in enumerate(came):
        if barrier.key != came[0].key:
            return (
                f"replica 0 waits in {came[0].words}, and replica {number} in "
                f"{barrier.words}: all replicas do the same things in the same order"
            )
    return None
