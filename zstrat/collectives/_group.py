"""A group of ranks: the public face of collectives.

Calls are numbered in the order in which they are made, in the caller's thread; ranks
must make the same calls in the same order. Calls with a tag are numbered by tag.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.cluster import TFConfigClusterResolver
from zstrat.config import environment, settings_from
from zstrat.errors import ClosedError

from . import _operations as operations
from ._compression import Compression, Compressor
from ._engine import Kind
from ._forming import Wish, form, lane_named, own_seat, seats_of
from ._leaves import Slices, described, flatten, leaf_of
from ._plans import checked_algorithm
from ._reduction import reduction_of
from ._station import station_for
from ._terms import ReduceOp
from ._work import Options, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from zstrat.cluster import ClusterResolver
    from zstrat.config import Settings

    from ._leaves import Leaf
    from ._membership import Seat
    from ._operations import Draft, Steps
    from ._pending import Pending

_SLACK: Final = 5.0
"""Seconds that forming may take beyond its patience, to say what was wrong."""


class Group:
    """Processes that compute together; blocks until all of them are there.

    Args:
        resolver: Who is in the cluster, and which task this process is; default:
            TF_CONFIG. Without a cluster the group has one rank.
        name: The same on all ranks; a process may be in several groups.
        tasks: The members in the order of ranks, as "worker:0" or "/job:worker/task:0";
            default: chief and workers.
        timeout: Seconds that each call may take; default: ``timeouts.request``.
        rendezvous_timeout: Seconds to wait for all ranks; ``timeouts.connect``.
        lane: "auto" (memory of one host is shared), "shm", "ipc" or "tcp" (it is not);
            default: ``ZSTRAT_LANE``.
        bytes_per_pack: Small arrays that are reduced together travel in packs, from the
            last to the first; a pack that is larger than this takes no more. 0: packs
            of some MiB. Arrays of 128 KiB and more travel by themselves, without a
            copy. The same on all ranks.
        bind: Where this process listens, if not at the address of its task.
        settings: Default: from ``ZSTRAT_*``.

    Raises:
        CollectiveTimeoutError: Not all ranks came in time; names those that did not.
        InvalidArgumentError: The ranks do not agree on who they are.
        ValueError: It is not clear which task this process is, or it is no member;
            ``bytes_per_pack`` is negative.
        OSError, PermissionDeniedError: The address of this task cannot be bound.
    """

    def __init__(
        self,
        resolver: ClusterResolver | None = None,
        *,
        name: str = "group",
        tasks: Sequence[str] | None = None,
        timeout: float | None = None,
        rendezvous_timeout: float | None = None,
        lane: str | None = None,
        bytes_per_pack: int = 0,
        bind: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._prepare(
            resolver,
            name,
            tasks,
            timeout,
            rendezvous_timeout,
            lane,
            bytes_per_pack,
            bind,
            settings,
        )
        self._station = station_for(self._seat, self._bind, self._settings)
        try:
            self._work = self._form_now(self._wish(self._seats, 0, self._patience))
        except BaseException:
            self._station.release()
            raise

    @classmethod
    async def create(
        cls,
        resolver: ClusterResolver | None = None,
        *,
        name: str = "group",
        tasks: Sequence[str] | None = None,
        timeout: float | None = None,
        rendezvous_timeout: float | None = None,
        lane: str | None = None,
        bytes_per_pack: int = 0,
        bind: str | None = None,
        settings: Settings | None = None,
    ) -> Group:
        """As the constructor, awaitable.

        Cancellation: this process has not joined.
        """
        group = cls.__new__(cls)
        group._prepare(
            resolver,
            name,
            tasks,
            timeout,
            rendezvous_timeout,
            lane,
            bytes_per_pack,
            bind,
            settings,
        )
        group._station = await asyncio.to_thread(
            station_for, group._seat, group._bind, group._settings
        )
        try:
            wish = group._wish(group._seats, 0, group._patience)
            group._work = await group._form(wish)
        except BaseException:
            await asyncio.to_thread(group._station.release)
            raise
        return group

    def _prepare(
        self,
        resolver: ClusterResolver | None,
        name: str,
        tasks: Sequence[str] | None,
        timeout: float | None,
        rendezvous_timeout: float | None,
        lane: str | None,
        bytes_per_pack: int,
        bind: str | None,
        settings: Settings | None,
    ) -> None:
        self._settings = settings or settings_from(environment())
        self._resolver = resolver or TFConfigClusterResolver()
        self.name, self._tasks = name, tasks
        times = self._settings.timeouts
        self._timeout = _positive("timeout", timeout, times.request)
        self._patience = _positive(
            "rendezvous_timeout", rendezvous_timeout, times.connect
        )
        self.lane = lane_named(lane or self._settings.lane)
        if bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack={bytes_per_pack}: expected 0 or more")
        self._bytes_per_pack = bytes_per_pack
        self._seats = seats_of(self._resolver, tasks)
        self._seat = own_seat(self._resolver, self._seats)
        self._bind = self._seat.address if bind is None else bind
        self._is_closed = False

    # ---- who we are ------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this process in the group, from 0 on."""
        return self._work.generation.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._work.generation.size

    @property
    def generation(self) -> int:
        """0 at first; grows with each `reform`."""
        return self._work.generation.number

    @property
    def members(self) -> tuple[str, ...]:
        """The tasks, in the order of ranks: ``/job:worker/task:0``."""
        return tuple(member.task for member in self._work.generation.members)

    @property
    def is_broken(self) -> bool:
        """A rank was lost, left, or did not take part: `reform` is needed."""
        return self._work.generation.broken is not None

    # ---- collectives -----------------------------------------------------------------

    def all_reduce(
        self,
        tree: Any,
        op: ReduceOp | str = "sum",
        *,
        in_place: bool = False,
        densify: bool = False,
        tag: str | None = None,
        timeout: float | None = None,
        compression: str | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """Every array of ``tree``, reduced over all ranks: the same bits on all.

        Args:
            tree: Arrays, numbers, or a pytree of them, of the same shapes and dtypes on
                all ranks. f16 and bf16 are summed in f32 and rounded once.
                IndexedSlices are concatenated in the order of ranks; their lengths may
                differ.
            op: "sum", "mean", "min" or "max".
            in_place: Write into the (numpy) arrays that were given, and return them.
            densify: Reduce IndexedSlices as the whole arrays that they stand for.
            tag: Numbers this call among those with the same tag alone, so that other
                ranks may make it earlier or later than calls without.
            timeout: Seconds; default: that of the group.
            compression: How contributions travel; default: as they are.
            algorithm: Default: chosen by size.

        Returns:
            The tree, with new arrays of the same kinds (numpy or jax).

        Raises:
            CollectiveTimeoutError: A rank did not call in time, or hangs; names it.
            PeerLostError: A rank is gone; names it.
            InvalidArgumentError: The ranks do not make the same calls; says who does
                what.
            UnavailableError: The group is broken since an earlier call; see `reform`.
            TypeError: Not for this dtype, or no array.
            BusyError: Too many operations are under way.

        Interrupting it (Ctrl-C) ends the generation, for all ranks.
        """
        options = self._options(timeout, tag, compression, algorithm)
        return self._wait(
            *self._all_reduce(tree, op, in_place, densify, options), options
        )

    def all_reduce_async(
        self,
        tree: Any,
        op: ReduceOp | str = "sum",
        *,
        in_place: bool = False,
        densify: bool = False,
        tag: str | None = None,
        timeout: float | None = None,
        compression: str | None = None,
        algorithm: str | None = None,
    ) -> Pending[Any]:
        """As `all_reduce`, but returns at once what can be awaited.

        The arrays must not be changed before it is over.
        """
        options = self._options(timeout, tag, compression, algorithm)
        return self._start(
            *self._all_reduce(tree, op, in_place, densify, options), options
        )

    def all_gather(
        self,
        tree: Any,
        axis: int = 0,
        *,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Every array of ``tree`` of all ranks, concatenated in the order of ranks.

        Args:
            tree: Arrays of at least one dim. Their lengths along ``axis`` may differ
                from rank to rank, nothing else.
            axis: Along which they are concatenated.

        Raises:
            ValueError: An array has no such axis.
            Others: As `all_reduce`.
        """
        return self._wait(*self._all_gather(tree, axis), self._options(timeout, tag))

    def all_gather_async(
        self,
        tree: Any,
        axis: int = 0,
        *,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> Pending[Any]:
        """As `all_gather`, but returns at once what can be awaited."""
        return self._start(*self._all_gather(tree, axis), self._options(timeout, tag))

    def reduce_scatter(
        self,
        tree: Any,
        op: ReduceOp | str = "sum",
        *,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Every array of ``tree`` reduced over all ranks; each rank gets its rows.

        The first axis is cut into one part per rank, in the order of ranks; if it does
        not divide, the first ranks have one row more.

        Raises:
            ValueError: An array has no axis.
            Others: As `all_reduce`.
        """
        return self._wait(*self._reduce_scatter(tree, op), self._options(timeout, tag))

    def reduce_scatter_async(
        self,
        tree: Any,
        op: ReduceOp | str = "sum",
        *,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> Pending[Any]:
        """As `reduce_scatter`, but returns at once what can be awaited."""
        return self._start(*self._reduce_scatter(tree, op), self._options(timeout, tag))

    def broadcast(
        self,
        tree: Any,
        root: int = 0,
        *,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """The arrays of rank ``root``, on all ranks.

        Args:
            tree: Of the same shapes and dtypes on all ranks; its values count at the
                root alone.

        Raises:
            ValueError: There is no such rank.
            Others: As `all_reduce`.
        """
        return self._wait(*self._broadcast(tree, root), self._options(timeout, tag))

    def broadcast_async(
        self,
        tree: Any,
        root: int = 0,
        *,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> Pending[Any]:
        """As `broadcast`, but returns at once what can be awaited."""
        return self._start(*self._broadcast(tree, root), self._options(timeout, tag))

    def all_to_all(
        self,
        array: Any,
        *,
        splits: Sequence[int] | None = None,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Part j of the first axis goes to rank j; what came, in the order of ranks.

        Args:
            splits: Rows for each rank; default: as many for each, and the first axis
                has to divide.

        Raises:
            ValueError: The rows do not add up.
            Others: As `all_reduce`.
        """
        return self._wait(*self._all_to_all(array, splits), self._options(timeout, tag))

    def all_to_all_async(
        self,
        array: Any,
        *,
        splits: Sequence[int] | None = None,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> Pending[Any]:
        """As `all_to_all`, but returns at once what can be awaited."""
        options = self._options(timeout, tag)
        return self._start(*self._all_to_all(array, splits), options)

    def barrier(self, *, tag: str | None = None, timeout: float | None = None) -> None:
        """Returns when all ranks have called it. Raises: as `all_reduce`."""
        self._wait("barrier()", operations.barrier, self._options(timeout, tag))

    def barrier_async(
        self, *, tag: str | None = None, timeout: float | None = None
    ) -> Pending[None]:
        """As `barrier`, but returns at once what can be awaited."""
        options = self._options(timeout, tag)
        return self._start("barrier()", operations.barrier, options)

    # ---- the life of a group ---------------------------------------------------------

    def reform(
        self,
        *,
        tasks: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """A new generation, with the survivors or with newcomers.

        Everybody who goes on calls it, with the same members; a process that was
        started anew makes its `Group` and is among them. What belongs to the old
        generation fails, here and wherever it still travels.

        Args:
            tasks: The members from now on; default: those that the group was made with,
                so that it waits for a lost one to be started anew.
            ranks: The same, as ranks of the generation that ends.
            timeout: Seconds to wait for all of them.

        Raises:
            As the constructor; the group stays broken, and it may be called again.
        """
        wish = self._next(tasks, ranks, timeout)
        self._leave("it forms a new generation")
        self._work = self._form_now(wish)
        self._seats = wish.seats

    async def reform_async(
        self,
        *,
        tasks: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """As `reform`. Cancellation: the group stays broken."""
        wish = self._next(tasks, ranks, timeout)
        await asyncio.to_thread(self._leave, "it forms a new generation")
        self._work = await self._form(wish)
        self._seats = wish.seats

    def close(self) -> None:
        """Leaves the group: what was sent arrives, what is under way fails.

        Other ranks that need this one hear that it left. Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._leave("it closed the group")
        finally:
            self._station.release()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    # ---- private ---------------------------------------------------------------------

    def _wish(self, seats: tuple[Seat, ...], generation: int, patience: float) -> Wish:
        rank = [(s.job, s.number) for s in seats].index(
            (self._seat.job, self._seat.number)
        )
        return Wish(self.name, generation, seats, rank, self.lane, patience)

    def _next(
        self,
        tasks: Sequence[str] | None,
        ranks: Sequence[int] | None,
        timeout: float | None,
    ) -> Wish:
        self._check_open()
        if tasks is not None and ranks is not None:
            raise ValueError("reform: give tasks or ranks, not both")
        if ranks is not None:
            wrong = [rank for rank in ranks if not 0 <= rank < self.size]
            if wrong or self.rank not in ranks:
                raise ValueError(
                    f"ranks={list(ranks)}: expected ranks below {self.size}, and this "
                    f"one ({self.rank}) among them"
                )
            seats = tuple(self._seats[rank] for rank in sorted(set(ranks)))
        else:
            seats = seats_of(self._resolver, self._tasks if tasks is None else tasks)
            own_seat(self._resolver, seats)
        patience = _positive("timeout", timeout, self._patience)
        return self._wish(seats, self.generation + 1, patience)

    def _form_now(self, wish: Wish) -> Work:
        generation, engine = self._station.run(
            form(self._station, wish),
            wish.patience + _SLACK,
            f"forming group {self.name!r}",
        )
        return Work(self._station, generation, engine)

    async def _form(self, wish: Wish) -> Work:
        what = f"forming group {self.name!r}"
        generation, engine = await self._station.run_async(
            form(self._station, wish), what
        )
        return Work(self._station, generation, engine)

    def _leave(self, reason: str) -> None:
        work, node = self._work, self._station.node
        self._station.run(
            node.leave(work.generation, reason), _SLACK, f"leaving group {self.name!r}"
        )
        work.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"group {self.name!r} is closed")

    def _options(
        self,
        timeout: float | None,
        tag: str | None,
        compression: str | None = None,
        algorithm: str | None = None,
    ) -> Options:
        seconds = _positive("timeout", timeout, self._timeout)
        return Options(seconds, tag, compression, algorithm, self._bytes_per_pack)

    def _start(
        self, words: str, make: Callable[[Draft], Steps], options: Options
    ) -> Pending[Any]:
        self._check_open()
        return self._work.launch(_full(words, options), make, options, blocking=False)

    def _wait(
        self, words: str, make: Callable[[Draft], Steps], options: Options
    ) -> Any:
        self._check_open()
        work, words = self._work, _full(words, options)
        try:
            return work.launch(words, make, options, blocking=True).result()
        except Exception:
            raise
        except BaseException:
            work.interrupt(words)
            raise

    def _all_reduce(
        self,
        tree: Any,
        op: ReduceOp | str,
        in_place: bool,
        densify: bool,
        options: Options,
    ) -> tuple[str, Callable[[Draft], Steps]]:
        op = ReduceOp.of(op)
        checked_algorithm(Kind.ALL_REDUCE, options.algorithm)
        found, rebuild = flatten(tree)
        if densify:
            found = [x.to_dense() if isinstance(x, Slices) else x for x in found]
        dense = {
            at: leaf_of(x) for at, x in enumerate(found) if not isinstance(x, Slices)
        }
        sparse = {at: x for at, x in enumerate(found) if isinstance(x, Slices)}
        leaves = list(dense.values())
        self._check_reducible(op, leaves, options.compression)
        if in_place:
            _check_writable(leaves, sparse)
        rows = [
            leaf_of(part) for x in sparse.values() for part in (x.values, x.indices)
        ]
        self._check_reducible(op, rows[::2])
        _check_sparse(op, rows)
        words = _named("all_reduce", [*leaves, *rows], op.value, free=rows)

        def make(draft: Draft) -> Steps:
            many = [operations.all_reduce(draft, leaves, op, in_place)]
            if rows:
                many.append(operations.all_gather(draft, rows, [0] * len(rows)))
            return operations.together(many, finish)

        def finish(parts: list[list[Any]]) -> Any:
            out = dict(zip(dense, parts[0], strict=True))
            gathered = iter(parts[1] if rows else ())
            for at, slices in sparse.items():
                values, indices = next(gathered), next(gathered)
                if op is ReduceOp.MEAN:
                    values = values / self.size
                out[at] = dataclasses.replace(  # type: ignore[type-var]
                    slices, values=values, indices=indices
                )
            return rebuild([out[at] for at in range(len(found))])

        return words, make

    def _all_gather(self, tree: Any, axis: int) -> tuple[str, Callable[[Draft], Steps]]:
        found, rebuild = flatten(tree)
        leaves, axes = [], []
        for each in map(leaf_of, found):
            ndim = len(each.shape)
            if not -ndim <= axis < ndim:
                raise ValueError(
                    f"all_gather along axis {axis}: an array of shape {each.shape} has "
                    "no such axis"
                )
            axes.append(axis % ndim)
            leaves.append(each if not axis % ndim else each.moved(axis))
        words = _named("all_gather", leaves, f"axis={axis}", free=leaves)
        steps = operations.all_gather
        return words, lambda draft: operations.rebuilt(
            steps(draft, leaves, axes), rebuild
        )

    def _reduce_scatter(
        self, tree: Any, op: ReduceOp | str
    ) -> tuple[str, Callable[[Draft], Steps]]:
        op = ReduceOp.of(op)
        found, rebuild = flatten(tree)
        leaves = [leaf_of(each) for each in found]
        self._check_reducible(op, leaves)
        _check_axis("reduce_scatter", leaves)
        words = _named("reduce_scatter", leaves, op.value)
        return words, lambda draft: operations.rebuilt(
            operations.reduce_scatter(draft, leaves, op), rebuild
        )

    def _broadcast(self, tree: Any, root: int) -> tuple[str, Callable[[Draft], Steps]]:
        if not 0 <= root < self.size:
            raise ValueError(f"root={root}: expected a rank below {self.size}")
        found, rebuild = flatten(tree)
        leaves = [leaf_of(each) for each in found]
        words = _named("broadcast", leaves, f"root={root}")
        return words, lambda draft: operations.rebuilt(
            operations.broadcast(draft, leaves, root), rebuild
        )

    def _all_to_all(
        self, array: Any, splits: Sequence[int] | None
    ) -> tuple[str, Callable[[Draft], Steps]]:
        leaf = leaf_of(array)
        _check_axis("all_to_all", [leaf])
        rows, size = leaf.shape[0], self.size
        if splits is None and rows % size:
            raise ValueError(
                f"all_to_all of {rows} rows among {size} ranks: they do not divide; "
                "say with splits= how many each rank gets"
            )
        if splits is not None and (
            len(splits) != size or sum(splits) != rows or min(splits) < 0
        ):
            raise ValueError(
                f"splits={list(splits)}: expected {size} counts that add up to {rows}"
            )
        free = [] if splits is None else [leaf]
        words = _named("all_to_all", [leaf], free=free)
        return words, lambda draft: operations.rebuilt(
            operations.all_to_all(draft, leaf, splits), lambda leaves: leaves[0]
        )

    def _check_reducible(
        self, op: ReduceOp, leaves: Iterable[Leaf], compression: str | None = None
    ) -> None:
        for dtype in {leaf.flat.dtype for leaf in leaves}:
            reduction = reduction_of(op, dtype, self.size)
            if compression is not None:
                Compressor(Compression.of(compression)).codec("", reduction)


def _named(
    name: str, leaves: Sequence[Leaf], *more: str, free: Sequence[Leaf] = ()
) -> str:
    """An operation in words; ``free`` are leaves whose first axis may differ."""
    words = ", ".join([described(leaves, free), *more])
    return f"{name}({words})"


def _full(words: str, options: Options) -> str:
    extra = [
        f"{name}={value!r}"
        for name, value in (
            ("compression", options.compression),
            ("algorithm", options.algorithm),
            ("bytes_per_pack", options.bytes_per_pack or None),
        )
        if value is not None
    ]
    return ", ".join([words[:-1], *extra]) + ")" if extra else words


def _check_axis(name: str, leaves: Sequence[Leaf]) -> None:
    for leaf in leaves:
        if not leaf.shape:
            raise ValueError(f"{name}: expected arrays with an axis, got a number")


def _check_writable(leaves: Sequence[Leaf], sparse: object) -> None:
    if sparse:
        raise TypeError("in_place: IndexedSlices change their length")
    for leaf in leaves:
        if leaf.is_jax or not isinstance(leaf.origin, np.ndarray):
            raise TypeError(
                f"in_place: {type(leaf.origin).__name__} cannot be written to: give "
                "numpy arrays, or take what is returned"
            )
        if not leaf.origin.flags.writeable:
            raise ValueError("in_place: an array is read-only")


def _check_sparse(op: ReduceOp, rows: Sequence[Leaf]) -> None:
    if rows and op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise TypeError(
            f"{op.value} of IndexedSlices: expected SUM or MEAN; use densify=True"
        )


def _positive(name: str, given: float | None, default: float) -> float:
    value = default if given is None else given
    if not value > 0:
        raise ValueError(f"{name}={given}: expected seconds above 0")
    return float(value)
