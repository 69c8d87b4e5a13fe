"""The operations of a group that users call, blocking and asynchronous.

For each operation, a method with an underscore has the parameters and makes the
request, whose arguments are checked (`_operations`) in the caller's thread. Two public
methods have the same parameters: one starts the request and waits for its result, the
other one only starts it.
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
    """Decorates a method that passes all of its arguments to ``signed``.

    mypy, editors and `inspect.signature` show the parameters of ``signed``, their types
    and defaults. The method keeps its first parameter and its return type.
    """

    def sign(
        method: Callable[Concatenate[Owner, ...], Result],
    ) -> Callable[Concatenate[Owner, P], Result]:
        own, taken = inspect.signature(method), inspect.signature(signed)
        first = next(iter(own.parameters.values()))
        rest = list(taken.parameters.values())[1:]
        # `inspect` and editors look here; mypy gets the same from `Concatenate`.
        method.__signature__ = own.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
        return method

    return sign


class GroupCalls:
    """The operations of a `Group`, which sets the attributes declared here."""

    _invited: Invitation
    _runtime: GroupRuntime
    _work: OperationScheduler
    """Runs the operations of the present generation."""
    _is_closed: bool

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._work.generation.size

    def _check_open(self) -> None:
        group = f"group {self._invited.name!r}"
        if self._is_closed:
            raise ClosedError(f"{group} is closed")
        # A forked process has no thread that would run the loop: it would wait for
        # nobody.
        require_own(self._runtime.node.loop, group)

    def _options(
        self,
        timeout: float | None,
        tag: str | None,
        algorithm: str | None = None,
        compression: str | None = None,
        bytes_per_pack: int | None = None,
    ) -> CallOptions:
        """Returns the options of a call, with the defaults of the group.

        Raises:
            ValueError: ``timeout`` is not above 0, or ``bytes_per_pack`` is negative.
        """
        invited = self._invited
        seconds = positive("timeout", timeout, invited.timeout)
        packs = invited.bytes_per_pack
        if bytes_per_pack is not None:
            packs = not_negative("bytes_per_pack", bytes_per_pack)
        return CallOptions(seconds, tag, compression, algorithm, packs)

    def _start(self, request: OperationRequest) -> Pending[Any]:
        """Starts an operation, and returns its pending result."""
        self._check_open()
        return self._work.launch(request, blocking=False)

    def _wait(self, request: OperationRequest) -> Any:
        """Runs an operation, and returns its result."""
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
        """Reduces every array of ``tree`` over all ranks: the same bits on all ranks.

        Args:
            tree: Arrays, numbers, or a pytree of them, of the same shapes and dtypes on
                all ranks. f16 and bf16 are summed in f32 and rounded once.
                IndexedSlices are concatenated in the order of ranks; their lengths may
                differ.
            op: "sum", "mean", "min" or "max".
            in_place: Write into the given (numpy) arrays, and return them. If the call
                fails, their content is undefined.
            densify: Reduce IndexedSlices as dense arrays.
            tag: Calls with the same tag are numbered separately, so that other ranks
                may make them earlier or later than other calls.
            timeout: Seconds; default: that of the group.
            compression: How contributions are compressed; default: not at all. What
                "int8" and "topk" leave out is added to the next call with the same tag,
                shapes and dtypes; so it is lost if every call has another tag.
            algorithm: "ring", "tree", ... (`ALGORITHMS`), for calls that go as
                messages; default: chosen by size.
            bytes_per_pack: See `Group`; default: that of the group.

        Returns:
            The tree, with new arrays of the same kinds (numpy or jax) and shapes.

        Raises:
            CollectiveTimeoutError: A rank did not make the call in time, or hangs; the
                error names the rank.
            PeerLostError: A rank is lost; the error names the rank.
            InvalidArgumentError: The ranks make different calls; the error names both
                calls.
            UnavailableError: The group is broken since an earlier call; see `reform`.
            TypeError: A leaf is not an array, has an unsupported dtype, or cannot be
                written to ``in_place``.
            ValueError: The op, algorithm or compression does not exist; ``timeout`` is
                not above 0, or ``bytes_per_pack`` is negative; an array that is reduced
                ``in_place`` is read-only, or shares memory with another one of the
                tree.
            BusyError: Too many operations are under way.
            ClosedError: The group was closed.

        Ctrl-C ends the generation, for all ranks.
        """
        return self._wait(self._all_reduce(*args, **kwargs))

    @parameters_of(_all_reduce)
    def all_reduce_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Starts `all_reduce`, and returns an awaitable at once.

        The arrays must not be changed before the operation has ended; with ``in_place``
        they are complete once the result was retrieved.
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
        """Concatenates the arrays of ``tree`` of all ranks, in the order of ranks.

        Args:
            tree: Arrays of at least one dimension. Only their lengths along ``axis``
                may differ between ranks.
            axis: Axis of the concatenation.

        Returns:
            The tree, with arrays as long along ``axis`` as those of all ranks together.

        Raises:
            ValueError: An array does not have the axis; or as `all_reduce`.
            Others: As `all_reduce`.
        """
        return self._wait(self._all_gather(*args, **kwargs))

    @parameters_of(_all_gather)
    def all_gather_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Starts `all_gather`, and returns an awaitable at once."""
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
        """Reduces every array of ``tree`` over all ranks; each rank gets its rows.

        The first axis is divided into one part per rank, in the order of ranks; if the
        parts cannot be equal, the first ranks have one row more.

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
        """Starts `reduce_scatter`, and returns an awaitable at once."""
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
        """Sends the arrays of rank ``root`` to all ranks.

        The root does not wait for the other ranks: a rank that has not made the call
        yet keeps up to 1 GiB of received data. If there may be more data, and a rank
        may be late (after loading a checkpoint, for example), call `barrier` on all
        ranks before.

        Args:
            tree: Arrays ``[...]``, numbers, or a pytree of them, of the same shapes and
                dtypes on all ranks; only the values of the root are used.
            root: The rank that sends.
            in_place: Write into the given (numpy) arrays, and return them. The arrays
                of the root do not change; on the other ranks, if the call fails, the
                content of the arrays is undefined.

        Returns:
            The tree, with arrays of the same kinds and shapes: new arrays, unless
                ``in_place``.

        Raises:
            ValueError: ``root`` is not a rank; or as `all_reduce`.
            BusyError: As `all_reduce`; or a rank that had not made the call yet
                received more than 1 GiB, which ends the generation.
            Others: As `all_reduce`.
        """
        return self._wait(self._broadcast(*args, **kwargs))

    @parameters_of(_broadcast)
    def broadcast_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Starts `broadcast`, and returns an awaitable at once.

        The arrays must not be changed before the operation has ended; with ``in_place``
        they are complete once the result was retrieved.
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
        """Sends part j of the first axis to rank j, and returns the received parts.

        Args:
            array: ``[n, ...]``, of the same dtype and shape on all ranks; the first
                axis may differ if there are ``splits``.
            splits: Number of rows for each rank, with the sum n; default: equal
                numbers, so that n must be a multiple of the number of ranks.

        Returns:
            ``[m, ...]``: the part from rank 0, then the part from rank 1, and so on; m
            is n if all parts are equal.

        Raises:
            ValueError: The splits do not add up to n, or n is not a multiple of the
                number of ranks; the array has no axis; or as `all_reduce`.
            Others: As `all_reduce`.
        """
        return self._wait(self._all_to_all(*args, **kwargs))

    @parameters_of(_all_to_all)
    def all_to_all_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Starts `all_to_all`, and returns an awaitable at once."""
        return self._start(self._all_to_all(*args, **kwargs))

    def barrier(self, *, tag: str | None = None, timeout: float | None = None) -> None:
        """Waits until all ranks have called `barrier`. Raises: as `all_reduce`."""
        self._wait(operations.barrier(self._options(timeout, tag)))

    def barrier_async(
        self, *, tag: str | None = None, timeout: float | None = None
    ) -> Pending[None]:
        """Starts `barrier`, and returns an awaitable at once."""
        return self._start(operations.barrier(self._options(timeout, tag)))
