"""Runs replicas sequentially, as greenlets that wait for each other at barriers.

Each replica is a greenlet with a separate context (with its current replica and
recorder). The replicas run in their order, each until it ends or waits at a *barrier*
(`_barriers` makes them). When all replicas wait, the caller computes the result of the
barrier once, and each replica continues with its part of the result. So only one
replica runs at a time, and the order is always the same: names of variables and random
numbers are equal in every run.

Replicas are not threads, because a jax trace belongs to a thread, and replicas may
switch during a trace.

Law: each replica that waits is resumed or ended; if a replica fails, all others are
ended.

jax keeps its settings per thread, and sequential replicas share one thread: a setting
that a waiting replica has changed would apply to the other replicas, and if contexts
were not left in the reverse order of entering them, the change would persist. Names for
profiles (`jax.named_scope`) are saved and restored when replicas switch; jax offers no
clean way to do so for other settings, so changing them is an error.
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
"""Settings of jax, and the context managers that change them."""

# One call in C for all settings, because it is made at every barrier.
_read: Final = operator.attrgetter(*_CONTEXTS)


class JaxSettings:
    """The settings of jax in this thread, recorded when this object is made."""

    __slots__ = ("_mesh", "_names", "_values")

    def __init__(self) -> None:
        self._values = _read(jax.config)
        self._mesh = jax.sharding.get_abstract_mesh()
        self._names = source_info_util.current_name_stack()

    def require_unchanged(self, what: str) -> None:
        """Refuses to switch to other replicas while settings differ from the recorded
        ones.

        Raises:
            RuntimeError: A setting has been changed.
        """
        # The mesh is not among the values of `jax.config`.
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
        """Restores the recorded names for profiles in the block."""
        context: AbstractContextManager[Any]
        context = source_info_util.set_name_stack(self._names)
        return context


class NeedsSequential(BaseException):
    """Raised if a function cannot be one program for all replicas. Not an `Exception`,
    because the function itself must not catch it."""


@dataclass(frozen=True, slots=True)
class ReplicaBarrier:
    """The request of one replica that waits at a barrier.

    ``key`` identifies the barrier: it is the same for all replicas that wait at it;
    ``words`` describes the barrier. ``join`` computes, from the values of all replicas,
    the result for each of them; the ``join`` of replica 0 is called. ``handled`` is the
    exception that the replica is handling, if any.
    """

    key: Hashable
    words: str
    value: Any
    join: Callable[[Sequence[Any]], Sequence[Any]]
    handled: BaseException | None = field(default_factory=sys.exception)


class ReplicaFiber:
    """One replica of a sequential run: a greenlet in which its function runs and
    waits."""

    def __init__(self, number: int, body: Callable[[ReplicaFiber], Any]) -> None:
        self.number = number
        self.result: Any = None
        self.barrier: ReplicaBarrier | None = None
        """The barrier at which the replica waits; None if it has ended."""
        self._body = body
        self._is_over = False
        self._trace: object = None
        self._settings: JaxSettings | None = None
        self._greenlet = greenlet(self._run)
        # A separate context: what is current in one replica is not in the others.
        self._greenlet.gr_context = contextvars.copy_context()

    @property
    def is_inside(self) -> bool:
        """Whether the replica's function currently runs inside a jax transformation."""
        return current_trace() != self._trace

    def wait_at(self, barrier: ReplicaBarrier) -> Any:
        """Waits for the other replicas at a barrier; returns the barrier's result for
        this replica.

        Raises:
            RuntimeError: Called inside a function that jax transforms, which cannot
                wait, or while a setting of jax is changed.
        """
        if self._is_over:
            # It cleans up; the other replicas no longer come to a barrier.
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

    def resume(self, given: Any) -> None:
        """Resumes the replica, with ``given`` as the barrier's result, until its end or
        the next barrier.

        Raises:
            BaseException: Whatever the replica function raises.
        """
        switched = self._greenlet.switch(given)
        # A greenlet that returns gives its result, which is None.
        self.barrier = switched if isinstance(switched, ReplicaBarrier) else None

    def end_replica(self) -> None:
        """Ends a replica that waits or has not started, by raising an exception in
        it."""
        # Before it is resumed: its `finally` blocks may call merge_call again.
        self._is_over = True
        self.barrier = None
        if not self._greenlet.dead:
            # Unlike other exceptions, this one does not go on to the parent. A greenlet
            # that has not started ends without running.
            self._greenlet.throw(GreenletExit)

    def _run(self, _: Any) -> None:
        # Here, not in `__init__`: what the caller has entered around strategy.run is
        # not a change that the replica made.
        self._trace, self._settings = current_trace(), JaxSettings()
        current_fiber.set(self)
        self.result = self._body(self)


current_fiber: Final[ContextVar[ReplicaFiber | None]] = ContextVar(
    "zstrat_fiber", default=None
)
"""The fiber in which this code runs, if any. Set only in the context of that fiber."""


def run_fibers(
    bodies: Sequence[Callable[[ReplicaFiber], Any]],
    during: Callable[[int], AbstractContextManager[Any]],
) -> list[Any]:
    """Runs the replicas until all have ended; returns their results, in order.

    Args:
        bodies: One function for each replica.
        during: Function that makes a context manager, which is entered while the
            replica of this number runs.

    Raises:
        RuntimeError: Not all replicas wait at the same barriers.
        BaseException: Whatever a replica or a barrier raises; all other replicas are
            ended.
    """
    fibers = [ReplicaFiber(number, body) for number, body in enumerate(bodies)]
    given: Sequence[Any] = [None] * len(fibers)
    try:
        while True:
            for fiber, value in zip(fibers, given, strict=True):
                with during(fiber.number):
                    fiber.resume(value)
            barriers = [fiber.barrier for fiber in fibers]
            if not any(barriers):
                return [fiber.result for fiber in fibers]
            reached = _all_of(barriers)
            # The keys are equal, so any join would do. It runs outside of `during`:
            # merge_fn is called in no replica.
            given = reached[0].join([barrier.value for barrier in reached])
    except BaseException as error:  # to the caller, when all have ended
        _end_all(fibers, during, error)
        raise


def _end_all(
    fibers: Sequence[ReplicaFiber],
    during: Callable[[int], AbstractContextManager[Any]],
    error: BaseException,
) -> None:
    """Ends all replicas because of ``error``. Exceptions that they raise meanwhile are
    added to this error as notes.

    Raises:
        BaseException: One that is not an `Exception`, such as an interrupt, after all
            have ended.
    """
    interrupt: BaseException | None = None
    # Every one, even if cleaning up raises: else its `finally` blocks would run when
    # the greenlet is garbage-collected.
    for fiber in fibers:
        try:
            with during(fiber.number):
                fiber.end_replica()
        except Exception as other:  # goes into the note
            error.add_note(
                f"replica {fiber.number}, which was ended because of this, raised "
                f"{type(other).__name__} while it cleaned up: {other}"
            )
        except BaseException as other:  # to the caller, when all have ended
            interrupt = interrupt or other
    if interrupt is not None:
        raise interrupt from error


def _all_of(barriers: Sequence[ReplicaBarrier | None]) -> list[ReplicaBarrier]:
    """Returns the barriers at which the replicas wait, if it is the same one for all.

    Raises:
        RuntimeError: A replica waits elsewhere or has ended; the error names it. The
            cause is the exception that a replica is handling: one that fails does other
            things than the others.
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
    """Describes which replica waits at another barrier than replica 0, or at none; None
    if all wait at the same barrier."""
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
