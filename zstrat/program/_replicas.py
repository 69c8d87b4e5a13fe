"""One replica function on several local devices, as one program.

The function is traced once under a named axis ``replica``: collectives inside it are
jax's own over that axis. What it reads is found by an abstract trace first, because a
program over a mesh takes its inputs as arguments; then the same function is mapped over
the devices, or, where this process has fewer devices than there are replicas (a
coordinator that only plans, a debugging run), over an axis of one device, which gives
the same values.

Law of the file: an update made inside a replica is brought together with those of the
other replicas here, at the moment it is made, and reaches the step once. Gradients are
summed over the replicas; everything else follows the variable's aggregation. The rules
of captures hold inside too: a region is a capture of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from zstrat.variables import Optimizer, Recorder, Variable, read_all, recorder

from ._capture import Capture, Discovery, Replay
from ._collective import AXIS, aggregate
from ._context import asked

if TYPE_CHECKING:
    from zstrat.wire import UpdateOp

    from ._capture import Feed, Recorded
    from ._iterator import Element, StepIterator

# jax's stubs leave it untyped.
_spec: Final[Any] = PartitionSpec

ReplicaFunction = Callable[[Sequence[Any], Sequence[Any]], Any]
"""``(shared, own) -> pytree``: called with the shared arrays and this replica's own."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """An array that each replica returned: ``array[i]`` is replica i's. A leaf."""

    array: jax.Array


def replicate(
    fn: ReplicaFunction,
    shared: Sequence[Any],
    split: Sequence[Any],
    *,
    count: int,
    devices: Sequence[jax.Device] = (),
) -> Any:
    """Runs ``fn`` once per replica and returns its pytree, each array as `Stacked`.

    Leaves that are no jax arrays are the same object in every replica and stay what
    they are. Reads and updates of variables go through the step that is being traced,
    or to the variables' homes when none is.

    Args:
        shared: Arrays that every replica gets whole.
        split: Arrays ``[count, ...]``; replica i gets row i.
        count: Number of replicas, at least 2.
        devices: One per replica; if there are fewer, one device computes all replicas.

    Raises:
        ValueError: An update of a variable whose aggregation is NONE.
        NotImplementedError: A scatter update that cannot be aggregated.
        RuntimeError: An update under a jax transformation, a read after an optimizer's
            update, or a draw, inside a replica.
    """
    shared = [jnp.asarray(x) for x in shared]
    split = [jnp.asarray(x) for x in split]
    variables = _discover(fn, shared, split, count)
    outside = recorder.get()
    if outside is None:
        values = [jnp.asarray(value) for value in read_all(variables)]
    else:
        values = [outside.read(variable) for variable in variables]
    keys = [variable.spec.key for variable in variables]
    traced: list[_Traced] = []

    def one(values: Any, shared: Any, own: Any) -> tuple[list[Any], list[Any]]:
        known = dict(zip(keys, values, strict=True))
        replica = _Replica(Replay("strategy.run", known, ()))
        with replica.recording():
            leaves, treedef = jax.tree.flatten(fn(shared, own))
        traced[:] = [_Traced(leaves, treedef, replica.capture)]
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        return arrays, [update.operands for update in replica.capture.updates]

    arrays, operands = _mapped(one, count, devices)(values, shared, split)
    (region,) = traced
    if region.capture.asked_context and (tell := asked.get()) is not None:
        tell()
    for update, combined in zip(region.capture.updates, operands, strict=True):
        _update(outside, update, tuple(combined))
    return region.result([Stacked(array) for array in arrays])


@dataclass(frozen=True, slots=True)
class _Traced:
    """What the trace of a region left: leaves of its result, and its effects."""

    leaves: list[Any]
    treedef: Any
    capture: Capture

    def result(self, arrays: Sequence[Any]) -> Any:
        """The result, with these in place of its jax arrays."""
        stacked = iter(arrays)
        return self.treedef.unflatten(
            [next(stacked) if isinstance(x, jax.Array) else x for x in self.leaves]
        )


# ---- what a replica does with variables ------------------------------------------


class _Replica:
    """The recorder inside a replica function: updates are brought together with those
    of the other replicas, and noted by a capture of this region."""

    def __init__(self, feed: Feed) -> None:
        self.capture = Capture(feed)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with self.capture.recording():
            before = recorder.set(self)
            try:
                yield
            finally:
                recorder.reset(before)

    def read(self, variable: Variable) -> jax.Array:
        return self.capture.read(variable)

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[jax.Array, ...],
        optimizer: Optimizer | None,
    ) -> None:
        combined = aggregate(variable, op, operands)
        self.capture.update(variable, op, combined, optimizer)

    def drew(self, leaf: object) -> bool:
        del leaf  # nothing is drawn in here
        return False

    def draw(self, iterator: StepIterator) -> Any:
        raise RuntimeError(
            f"next() of {iterator.name} inside a replica function, which is one "
            "program for several replicas: draw before it, and give each replica its "
            "rows with strategy.run(fn, args=(next(iterator),))"
        )


# ---- mapping over the devices ----------------------------------------------------


def _discover(
    fn: ReplicaFunction, shared: Sequence[Any], split: Sequence[Any], count: int
) -> list[Variable]:
    """The variables that the function reads, in order of their first read.

    The step itself is not asked inside this trace: what it handed out here would belong
    to a trace that ends before the step does.
    """
    probes: list[_Replica] = []

    def abstract(seed: jax.Array, shared: Any, own: Any) -> None:
        probe = _Replica(Discovery(seed, _no_elements))
        probes[:] = [probe]
        with probe.recording():
            fn(shared, own)

    mapped = jax.vmap(
        abstract, in_axes=(None, None, 0), axis_name=AXIS, axis_size=count
    )
    jax.eval_shape(mapped, jnp.int8(0), list(shared), list(split))
    return list(probes[0].capture.reads.values())


def _no_elements(ordinal: int, iterator: StepIterator) -> Element:
    raise AssertionError(f"{iterator.name} was drawn from inside a replica")


def _mapped(
    one: Callable[..., Any], count: int, devices: Sequence[jax.Device]
) -> Callable[..., Any]:
    """``one`` over all replicas: outputs stacked, update operands as they are (they are
    equal on every replica)."""
    if len(devices) < count:
        return jax.vmap(
            one,
            in_axes=(None, None, 0),
            out_axes=(0, None),
            axis_name=AXIS,
            axis_size=count,
        )

    def body(values: Any, shared: Any, split: Any) -> Any:
        arrays, operands = one(values, shared, [x[0] for x in split])
        return [x[None] for x in arrays], operands

    each, whole = _spec(AXIS), _spec()
    return jax.shard_map(
        body,
        mesh=Mesh(np.array(devices[:count]), (AXIS,)),
        in_specs=(whole, whole, each),
        out_specs=(each, whole),
        # Off: replicas compute their own gradients of the shared values, and it is ours
        # to say when they are summed.
        check_vma=False,
    )


def _update(
    outside: Recorder | None, update: Recorded, operands: tuple[jax.Array, ...]
) -> None:
    variable, op = update.variable, update.op
    if outside is None:
        plain = tuple(np.asarray(x) for x in operands)
        variable.home.update(variable, op, plain, update.optimizer)
    else:
        outside.update(variable, op, operands, update.optimizer)
