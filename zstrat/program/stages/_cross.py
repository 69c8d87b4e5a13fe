"""Collectives between processes in a step: equations at which the program is divided.

A step of several processes is traced as one program, in which each collective is one
equation of a primitive defined here. XLA does not compile that equation: the program is
divided there (`_stages`), and its parts run before and after the collective. Outside of
traces the collective happens at once.

If XLA itself reaches the other processes (`_whole`), nothing is divided: the program is
mapped over the axis `PROCESS` of their common mesh, and a collective is jax's own.

Law of the file: all processes trace the same program, so they execute the same
collectives in the same order.
"""

from __future__ import annotations

import enum
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from zstrat.program.trace._tracebacks import here

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from jax.sharding import Mesh

# jax's stubs leave it untyped.
_psum: Final[Any] = jax.lax.psum


PROCESS: Final = "process"
"""Name of the mesh axis over the processes."""

within_mesh: Final[ContextVar[bool]] = ContextVar("zstrat_within_mesh", default=False)
"""Whether the present trace is mapped over `PROCESS`. Law of the file: the code that
sets this variable resets it."""


class Collective(Protocol):
    """The collectives of several processes; `zstrat.collectives.Group` implements this.

    Every process calls the same methods in the same order, with arrays of the same
    shapes and dtypes. Trees are lists of numpy arrays.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def generation(self) -> int:
        """Number of the group's generation: grows with each `reform`; 0 if no process
        was lost so far."""
        ...

    def all_reduce(self, tree: Any, op: str = "sum") -> Any:
        """Reduces arrays over all ranks; the results are read-only."""
        ...

    def all_gather(self, tree: Any, axis: int = 0) -> Any:
        """Concatenates the ranks' arrays along an axis."""
        ...

    def broadcast(self, tree: Any, root: int = 0) -> Any:
        """Returns the arrays of rank ``root`` on all ranks."""
        ...

    def under(self, options: Any) -> Collective:
        """Returns a group of the same processes with other options for its calls."""
        ...

    def reform(self, *, timeout: float | None = None) -> None:
        """Re-forms the group, with new processes in place of lost ones."""
        ...

    def close(self) -> None:
        """Leaves the group."""
        ...


class CrossKind(enum.Enum):
    """The kinds of collectives."""

    SUM = enum.auto()
    GATHER = enum.auto()
    """Concatenates the arrays of all processes along the first axis; each has equally
    many rows."""
    FIRST = enum.auto()
    """Gives every process the arrays of rank 0."""


class Channel:
    """A group of processes, as traced programs refer to it.

    The group may change (it is re-formed): traces depend on ``fingerprint``. With a
    ``mesh`` of the devices of all processes, whose axes are `PROCESS` and that of the
    replicas, XLA does the collectives of steps.

    Calls with other options use another channel (`under`), so that they are not batched
    with the calls of this one.
    """

    def __init__(
        self, collective: Collective, mesh: Mesh | None = None, options: Any = None
    ) -> None:
        self.collective = collective
        self.mesh = mesh
        self.options = options

    def under(self, options: Hashable) -> Channel:
        """Returns a channel of the same processes for calls with these options."""
        return Channel(self.collective, self.mesh, options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Channel) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Hashable:
        return id(self.collective), self.options

    @property
    def rank(self) -> int:
        return self.collective.rank

    @property
    def size(self) -> int:
        return self.collective.size

    @property
    def fingerprint(self) -> tuple[int, int]:
        """Identifies the present group of processes; programs depend on it."""
        return self.rank, self.size

    def carry_out(self, kind: CrossKind, arrays: Sequence[Any]) -> list[Any]:
        """Executes a collective for several arrays; waits for all processes.

        Raises:
            PeerLostError, CollectiveTimeoutError: A rank is lost or late; names it.
        """
        given = [np.asarray(array) for array in arrays]
        collective = self.collective
        # Options of single calls: the same processes in a view of their group.
        if self.options is not None:
            collective = collective.under(self.options)
        match kind:
            case CrossKind.SUM:
                return list(collective.all_reduce(given, "sum"))
            case CrossKind.GATHER:
                return list(collective.all_gather(given, 0))
            case CrossKind.FIRST:
                return list(collective.broadcast(given, 0))


def sum_over(
    channel: Channel, arrays: Sequence[jax.Array], axis: str | None = None
) -> list[jax.Array]:
    """Sums arrays over all processes. Differentiable: gradients are summed over all
    processes, too.

    Args:
        axis: Name of a mapped axis on which the arrays are equal.
    """
    return list(_crossed(channel, CrossKind.SUM, here(), axis)(tuple(arrays)))


def first_of(channel: Channel, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the arrays of rank 0, on all ranks."""
    return _bound(channel, CrossKind.FIRST, here(), arrays)


def gather_from(
    channel: Channel, arrays: Sequence[jax.Array], axis: str | None = None
) -> list[jax.Array]:
    """Concatenates the arrays of all processes, ``[size * n, ...]``.

    Differentiable: the gradient of a process's part is the sum of all processes'
    gradients of it.

    Args:
        axis: Name of a mapped axis on which the arrays are equal.
    """
    return list(_crossed(channel, CrossKind.GATHER, here(), axis)(tuple(arrays)))


crossing: Final[Any] = Primitive("zstrat_crossing")
"""The primitive of a collective between processes. Its equations have the parameters
``channel``, ``kind`` and ``where``."""
crossing.multiple_results = True


def _abstract(
    *operands: Any, channel: Channel, kind: CrossKind, where: str
) -> list[jax.core.ShapedArray]:
    del where
    return [_result(operand, channel, kind) for operand in operands]


def _result(operand: Any, channel: Channel, kind: CrossKind) -> jax.core.ShapedArray:
    shape = tuple(operand.shape)
    if kind is CrossKind.GATHER:
        shape = (shape[0] * channel.size, *shape[1:])
    made: Any = jax.core.ShapedArray  # untyped
    result: jax.core.ShapedArray = made(shape, operand.dtype)
    return result


def _now(
    *operands: Any, channel: Channel, kind: CrossKind, where: str
) -> list[jax.Array]:
    del where
    return [jnp.asarray(x) for x in channel.carry_out(kind, operands)]


crossing.def_abstract_eval(_abstract)
crossing.def_impl(_now)


def _bound(
    channel: Channel, kind: CrossKind, where: str, arrays: Sequence[Any]
) -> list[jax.Array]:
    if not arrays:
        return []
    given = [jnp.asarray(array) for array in arrays]
    # XLA reaches the other processes itself, so nothing is cut.
    if within_mesh.get():
        return _mapped(kind, given)
    results: list[jax.Array] = crossing.bind(
        *given, channel=channel, kind=kind, where=where
    )
    return list(results)


def _mapped(kind: CrossKind, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Executes the collective with jax's own operations, inside of a program over all
    processes."""
    match kind:
        case CrossKind.SUM:
            summed: list[jax.Array] = _psum(list(arrays), PROCESS)
            return summed
        case CrossKind.GATHER:
            return [gathered(x, PROCESS) for x in arrays]
        case CrossKind.FIRST:
            # A select: 0 * nan of another rank would be nan.
            is_mine = jax.lax.axis_index(PROCESS) == 0
            own = [jnp.where(is_mine, x, jnp.zeros_like(x)) for x in arrays]
            sums: list[jax.Array] = _psum(own, PROCESS)
            # A sum of booleans is not a boolean.
            return [x.astype(y.dtype) for x, y in zip(sums, arrays, strict=True)]


def gathered(array: jax.Array, axis: str) -> jax.Array:
    """Concatenates the parts of a mapped axis along the array's first axis."""
    if array.size:
        whole: jax.Array = jax.lax.all_gather(array, axis, tiled=True)
        return whole
    # XLA refuses empty arrays.
    return jnp.zeros(
        (jax.lax.axis_size(axis) * array.shape[0], *array.shape[1:]), array.dtype
    )


def _crossed(
    channel: Channel, kind: CrossKind, where: str, axis: str | None
) -> jax.custom_vjp[Any]:
    def crossed(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_bound(channel, kind, where, arrays))

    # One more collective: of what all have gathered, each takes its own part.
    def back(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = _bound(channel, CrossKind.SUM, where, gradients)
        if kind is CrossKind.GATHER:
            whole = [jnp.split(x, channel.size)[channel.rank] for x in whole]
        return tuple(whole)

    both = jax.custom_vjp(crossed)
    both.defvjp(
        lambda arrays: (crossed(arrays), None),
        lambda _, gradients: (_summed_once(back, gradients, axis),),
    )
    return both


def _summed_once(
    cross: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    gradients: tuple[Any, ...],
    axis: str | None,
) -> tuple[Any, ...]:
    """Sums gradients over all processes, and over all replicas of a mapped axis.

    Only one replica's gradient is sent to the other processes, so the gradients of all
    replicas are added before. The first replica gets the sum and the others zeros,
    because the gradient of the operation that made the arrays equal (a sum over the
    axis, say) adds them up once more.
    """
    if axis is None:
        return cross(gradients)
    whole = cross(tuple(_psum(list(gradients), axis)))
    is_first = jax.lax.axis_index(axis) == 0
    return tuple(jnp.where(is_first, x, jnp.zeros_like(x)) for x in whole)
