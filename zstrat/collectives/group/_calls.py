"""The collectives that a group offers: what its users call, blocking or not.

A method with an underscore makes the request of an operation: it has the parameters,
and what it is given is checked (`_operations`) in the caller's thread. The two public
methods of that name have the same parameters. One carries the request out and waits,
the other one only begins it; both leave numbers and threads to the group.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from zstrat.errors import ClosedError
from zstrat.transport import require_own

from . import _operations as operations
from ._arguments import CallOptions, not_negative, positive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.collectives._reduction import ReduceOp

    from ._invitation import Invitation
    from ._operations import OperationRequest
    from ._pending import Pending
    from ._runtime import GroupRuntime
    from ._scheduler import OperationScheduler

P = ParamSpec("P")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


def parameters_of(
    signed: Callable[Concatenate[Any, P], object],
) -> Callable[
    [Callable[Concatenate[Owner, ...], Result]], Callable[Concatenate[Owner, P], Result]
]:
    """A decorator for a method that hands all of its arguments on to ``signed``.

    mypy, editors and `inspect.signature` show the parameters of ``signed``, their types
    and their defaults. The method keeps its own first parameter and what it returns.
    """

    def sign(
        method: Callable[Concatenate[Owner, ...], Result],
    ) -> Callable[Concatenate[Owner, P], Result]:
        own, taken = inspect.signature(method), inspect.signature(signed)
        first = next(iter(own.parameters.values()))
        rest = list(taken.parameters.values())[1:]
        method.__signature__ = own.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
        return method

    return sign


class GroupCalls:
    """The operations of a `Group`, which sets what is declared here."""

    _invited: Invitation
    _runtime: GroupRuntime
    _work: OperationScheduler
    """Carries the operations of its generation out."""
    _is_closed: bool

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._work.generation.size

    def _check_open(self) -> None:
        group = f"group {self._invited.name!r}"
        if self._is_closed:
            raise ClosedError(f"{group} is closed")
        require_own(self._runtime.node.loop, group)

    def _options(
        self,
        timeout: float | None,
        tag: str | None,
        algorithm: str | None = None,
        compression: str | None = None,
        bytes_per_pack: int | None = None,
    ) -> CallOptions:
        """What a caller said, with what the group says where he did not.

        Raises:
            ValueError: ``timeout`` is not above 0, or ``bytes_per_pack`` below it.
        """
        invited = self._invited
        seconds = positive("timeout", timeout, invited.timeout)
        packs = invited.bytes_per_pack
        if bytes_per_pack is not None:
            packs = not_negative("bytes_per_pack", bytes_per_pack)
        return CallOptions(seconds, tag, compression, algorithm, packs)

    def _start(self, request: OperationRequest) -> Pending[Any]:
        """Begins the operation."""
        self._check_open()
        return self._work.launch(request, blocking=False)

    def _wait(self, request: OperationRequest) -> Any:
        """Carries the operation out; its result."""
        self._check_open()
        return self._work.carry_out(request)

    def _all_reduce(
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
        bytes_per_pack: int | None = None,
    ) -> OperationRequest:
        options = self._options(timeout, tag, algorithm, compression, bytes_per_pack)
        return operations.all_reduce(self.size, tree, op, in_place, densify, options)

    @parameters_of(_all_reduce)
    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Every array of ``tree``, reduced over all ranks: the same bits on all.

        Args:
            tree: Arrays, numbers, or a pytree of them, of the same shapes and dtypes on
                all ranks. f16 and bf16 are summed in f32 and rounded once.
                IndexedSlices are concatenated in the order of ranks; their lengths may
                differ.
            op: "sum", "mean", "min" or "max".
            in_place: Write into the (numpy) arrays that were given, and return them. If
                it fails, what is in them is of no use.
            densify: Reduce IndexedSlices as the whole arrays that they stand for.
            tag: Numbers this call among those with the same tag alone, so that other
                ranks may make it earlier or later than calls without.
            timeout: Seconds; default: that of the group.
            compression: How contributions travel; default: as they are. What "int8" and
                "topk" leave out is added to the next call with the same tag, shapes and
                dtypes; with another tag for every call it is lost.
            algorithm: "ring", "tree", ... (`ALGORITHMS`), for what goes by messages;
                default: chosen by size.
            bytes_per_pack: As of the group; default: what the group was given.

        Returns:
            The tree, with new arrays of the same kinds (numpy or jax) and shapes.

        Raises:
            CollectiveTimeoutError: A rank did not call in time, or hangs; names it.
            PeerLostError: A rank is gone; names it.
            InvalidArgumentError: The ranks do not make the same calls; says who does
                what.
            UnavailableError: The group is broken since an earlier call; see `reform`.
            TypeError: Not for this dtype, or no array, or none that can be written to
                ``in_place``.
            ValueError: There is no such op, algorithm or compression; ``timeout`` is
                not above 0, or ``bytes_per_pack`` below it; an array that is reduced
                ``in_place`` is read-only, or shares memory with another one of the
                tree.
            BusyError: Too many operations are under way.
            ClosedError: The group was closed.

        Interrupting it (Ctrl-C) ends the generation, for all ranks.
        """
        return self._wait(self._all_reduce(*args, **kwargs))

    @parameters_of(_all_reduce)
    def all_reduce_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """As `all_reduce`, but returns at once what can be awaited.

        The arrays must not be changed before it is over; with ``in_place`` they are
        complete when the result has been asked for.
        """
        return self._start(self._all_reduce(*args, **kwargs))

    def _all_gather(
        self,
        tree: Any,
        axis: int = 0,
        *,
        tag: str | None = None,
        timeout: float | None = None,
        algorithm: str | None = None,
    ) -> OperationRequest:
        options = self._options(timeout, tag, algorithm)
        return operations.all_gather(tree, axis, options)

    @parameters_of(_all_gather)
    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Every array of ``tree`` of all ranks, concatenated in the order of ranks.

        Args:
            tree: Arrays of at least one dim. Their lengths along ``axis`` may differ
                from rank to rank, nothing else.
            axis: Along which they are concatenated.

        Returns:
            The tree, with arrays as long along ``axis`` as those of all ranks together.

        Raises:
            ValueError: An array has no such axis; or as `all_reduce`.
            Others: As `all_reduce`.
        """
        return self._wait(self._all_gather(*args, **kwargs))

    @parameters_of(_all_gather)
    def all_gather_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """As `all_gather`, but returns at once what can be awaited."""
        return self._start(self._all_gather(*args, **kwargs))

    def _reduce_scatter(
        self,
        tree: Any,
        op: ReduceOp | str = "sum",
        *,
        tag: str | None = None,
        timeout: float | None = None,
        algorithm: str | None = None,
    ) -> OperationRequest:
        options = self._options(timeout, tag, algorithm)
        return operations.reduce_scatter(self.size, tree, op, options)

    @parameters_of(_reduce_scatter)
    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        """Every array of ``tree`` reduced over all ranks; each rank gets its rows.

        The first axis is cut into one part per rank, in the order of ranks; if it does
        not divide, the first ranks have one row more.

        Args:
            tree: Arrays ``[n, ...]``, of the same shapes and dtypes on all ranks; no
                IndexedSlices.
            op: "sum", "mean", "min" or "max".

        Returns:
            The tree, with arrays ``[m, ...]``: ``n // size`` rows, or one more on the
            first ``n % size`` ranks.

        Raises:
            ValueError: An array has no axis; or as `all_reduce`.
            Others: As `all_reduce`.
        """
        return self._wait(self._reduce_scatter(*args, **kwargs))

    @parameters_of(_reduce_scatter)
    def reduce_scatter_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """As `reduce_scatter`, but returns at once what can be awaited."""
        return self._start(self._reduce_scatter(*args, **kwargs))

    def _broadcast(
        self,
        tree: Any,
        root: int = 0,
        *,
        in_place: bool = False,
        tag: str | None = None,
        timeout: float | None = None,
        algorithm: str | None = None,
    ) -> OperationRequest:
        options = self._options(timeout, tag, algorithm)
        return operations.broadcast(self.size, tree, root, in_place, options)

    @parameters_of(_broadcast)
    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """The arrays of rank ``root``, on all ranks.

        The root does not wait for the others: what comes to a rank that has not called
        yet is kept there, up to 1 GiB. If there may be more, and a rank may be late
        (after loading a checkpoint, say), call `barrier` before it on all ranks.

        Args:
            tree: Arrays ``[...]``, numbers, or a pytree of them, of the same shapes and
                dtypes on all ranks; the values count at the root alone.
            root: The rank that has them.
            in_place: Write them into the (numpy) arrays that were given, and return
                those. The root's are left as they are; on the others, if it fails,
                what is in them is of no use.

        Returns:
            The tree, with arrays of the same kinds and shapes: new ones, if not
            ``in_place``.

        Raises:
            ValueError: There is no such rank; or as `all_reduce`.
            BusyError: As `all_reduce`; or more than 1 GiB came to a rank that had not
                called yet: the group has ended.
            Others: As `all_reduce`.
        """
        return self._wait(self._broadcast(*args, **kwargs))

    @parameters_of(_broadcast)
    def broadcast_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """As `broadcast`, but returns at once what can be awaited.

        The arrays must not be changed before it is over; with ``in_place`` they are
        complete when the result has been asked for.
        """
        return self._start(self._broadcast(*args, **kwargs))

    def _all_to_all(
        self,
        array: Any,
        *,
        splits: Sequence[int] | None = None,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> OperationRequest:
        options = self._options(timeout, tag)
        return operations.all_to_all(self.size, array, splits, options)

    @parameters_of(_all_to_all)
    def all_to_all(self, *args: Any, **kwargs: Any) -> Any:
        """Part j of the first axis goes to rank j; what came, in the order of ranks.

        Args:
            array: ``[n, ...]``, of the same dtype and, but for the first axis if there
                are ``splits``, the same shape on all ranks.
            splits: Rows for each rank, which add up to n; default: as many for each,
                and the first axis has to divide.

        Returns:
            ``[m, ...]``: what rank 0 gave to this one, then what rank 1 gave, and so
            on; m is n where all give as many.

        Raises:
            ValueError: The rows do not add up, or do not divide; there is no axis; or
                as `all_reduce`.
            Others: As `all_reduce`.
        """
        return self._wait(self._all_to_all(*args, **kwargs))

    @parameters_of(_all_to_all)
    def all_to_all_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """As `all_to_all`, but returns at once what can be awaited."""
        return self._start(self._all_to_all(*args, **kwargs))

    def barrier(self, *, tag: str | None = None, timeout: float | None = None) -> None:
        """Returns when all ranks have called it. Raises: as `all_reduce`."""
        self._wait(operations.barrier(self._options(timeout, tag)))

    def barrier_async(
        self, *, tag: str | None = None, timeout: float | None = None
    ) -> Pending[None]:
        """As `barrier`, but returns at once what can be awaited."""
        return self._start(operations.barrier(self._options(timeout, tag)))
