"""Which strategy is current, and on which side of it the code runs.

Outside everything the code is in the replica context of the default strategy. A scope
is the cross-replica context of its strategy; the body of ``run`` is the replica
context. A context variable holds the stack, so each thread and each asyncio task has
its own.

Law of the file: frames are pushed and popped here alone, and popped in reverse order;
anything else is an error that names both strategies.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from zstrat.collectives import ReduceOp
from zstrat.program import _replicas
from zstrat.variables import creator

from ._values import reduction, require_gatherable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import jax

    from zstrat.variables import Creator

    from ._strategy import Strategy


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One entered context; ``replica`` is None in the cross-replica context."""

    strategy: Strategy
    replica: ReplicaContext | None


_frames: Final[ContextVar[tuple[Frame, ...]]] = ContextVar("zstrat_frames", default=())


def current() -> Frame | None:
    """The innermost context, None outside of all."""
    frames = _frames.get()
    return frames[-1] if frames else None


def push(frame: Frame) -> None:
    """Enters a context."""
    _frames.set((*_frames.get(), frame))


def pop(frame: Frame) -> None:
    """Leaves the context that was entered last.

    Raises:
        RuntimeError: Another one was entered last.
    """
    frames = _frames.get()
    if not frames or frames[-1] is not frame:
        inner = frames[-1].strategy if frames else None
        raise RuntimeError(
            f"a context of {frame.strategy!r} is left while one of {inner!r} is the "
            "innermost: leave scopes in the reverse order of entering them, in the "
            "same thread and task"
        )
    _frames.set(frames[:-1])


class Scope:
    """What ``strategy.scope()`` returns: a context manager that yields the strategy.

    May be entered again inside itself; creates variables where its strategy says.
    """

    def __init__(self, strategy: Strategy, own: Creator | None) -> None:
        self._strategy = strategy
        self._creator = own
        self._entered: list[tuple[Frame, Creator | None]] = []

    def __enter__(self) -> Strategy:
        outer = current()
        if outer is not None and outer.strategy is not self._strategy:
            if outer.replica is None or not outer.strategy.is_default:
                raise RuntimeError(
                    f"Mixing different strategies: {self._strategy!r} is not "
                    f"{outer.strategy!r}, whose scope this code is in"
                )
        elif outer is not None and outer.replica is not None:
            refuse_replica_context("scope()")
        frame = Frame(self._strategy, None)
        self._entered.append((frame, creator.get()))
        push(frame)
        creator.set(self._creator)
        return self._strategy

    def __exit__(self, *exc: object) -> None:
        frame, before = self._entered[-1]
        pop(frame)
        self._entered.pop()
        # Not by token: an async generator may be closed in another context than the
        # one that it was entered in, where tokens are not valid.
        creator.set(before)


class ReplicaContext:
    """What a replica function knows about itself.

    With several replicas per worker, they are one traced program: the id is a traced
    int32, and `all_reduce` is a collective over the worker's devices.
    """

    def __init__(self, strategy: Strategy, replica_id: int | jax.Array) -> None:
        self._strategy = strategy
        self._replica_id = replica_id
        self._entered: list[Frame] = []

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """From 0 to ``num_replicas_in_sync - 1``."""
        return self._replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """This replica's device; those of all replicas where one trace serves all."""
        devices = self._strategy.extended.worker_devices
        if isinstance(self._replica_id, int):
            return (devices[self._replica_id % len(devices)],)
        return devices

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: object = None
    ) -> Any:
        """Sums or averages a pytree over the replicas; each gets the result.

        ``options`` is taken for TF's sake: the strategy knows how. Differentiable: the
        gradient is the same reduction of the incoming gradients. `IndexedSlices` are
        concatenated, duplicates kept.

        Cost: one collective over the devices of the process for all dense leaves, and
        one between the processes of the strategy, if there are several.

        Raises:
            ValueError: ``reduce_op`` is no reduction.
        """
        op = reduction(reduce_op)
        if self.num_replicas_in_sync == 1:
            return value
        return self._strategy._team().all_reduce(value, mean=op is ReduceOp.MEAN)

    def all_gather(self, value: Any, axis: int, options: object = None) -> Any:
        """Concatenates a pytree over the replicas along ``axis``, in replica order, for
        each of them.

        Every replica gives an array of the same shape. Differentiable: a replica's
        gradient is its part of the sum of the incoming gradients.

        Raises:
            NotImplementedError: A leaf is an `IndexedSlices`.
            ValueError: A leaf has rank 0.
        """
        require_gatherable(value)
        if self.num_replicas_in_sync == 1:
            return value
        return self._strategy._team().all_gather(value, axis)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``merge_fn(strategy, *args)`` once, in the cross-replica context.

        Raises:
            NotImplementedError: Several replicas of this process are one program, which
                has no place between them.
        """
        if not isinstance(self._replica_id, int):
            raise NotImplementedError(
                "merge_call: the replicas of this process are one traced program; use "
                "all_reduce and all_gather of the replica context, which are part of it"
            )
        frame = Frame(self._strategy, None)
        push(frame)
        try:
            with _replicas.merged():
                return merge_fn(self._strategy, *args, **(kwargs or {}))
        finally:
            pop(frame)

    def __enter__(self) -> ReplicaContext:
        frame = Frame(self._strategy, self)
        push(frame)
        self._entered.append(frame)
        return self

    def __exit__(self, *exc: object) -> None:
        pop(self._entered[-1])
        self._entered.pop()


def in_real_replica_context() -> bool:
    """Whether this code is in a replica function of a strategy (not of the default)."""
    frame = current()
    return (
        frame is not None
        and frame.replica is not None
        and not frame.strategy.is_default
    )


def refuse_replica_context(what: str) -> NoReturn:
    """The error of a method that needs the cross-replica context."""
    raise RuntimeError(
        f"{what} requires being in cross-replica context, but it is called inside a "
        "replica function (the body of strategy.run): call it before or after run; "
        "inside, use get_replica_context().all_reduce"
    )
