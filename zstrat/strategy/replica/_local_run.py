"""Runs the replicas of one process on its devices for ``run``, and merges their
results.

A replica function runs in one of two ways, with the same results.

- *As one program* for all replicas, compiled. In a step the program is a part of the
  step; elsewhere the function becomes a separate step, which is cached.
- *Sequentially* (`_fibers`), replica by replica, if it is not a pure function of
  arrays: if it calls ``merge_call``; if Python looks at a value in it (a branch,
  ``int``, ``numpy``); if it creates variables; if replicas get or return values that
  cannot be one array; if it is a ``zs.function(eager=True)``.

Where possible, the parts of all replicas are one array over the devices, which programs
take without copying it.

Laws of the file: tracing decides which of the two ways is used; no function runs twice.
On a CPU, where jax may use the memory of a numpy array directly, an array of the user
is copied first, and jax gets the copy.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from zstrat.data import native
from zstrat.memory import ALIGNMENT
from zstrat.program.trace import Plain, fits, joined
from zstrat.transport import POOL
from zstrat.variables import AbstractVariable, is_staging, is_weak, recorder

from ._collective import AXIS, Team
from ._fibers import NeedsSequential
from ._function_cache import FunctionCache, given, run_as
from ._mapped import one_array
from ._one_program import (
    NUMBERS,
    ReplicaCall,
    UnevenParts,
    alone,
    as_one_program,
    is_known,
    require_all_one_each,
    require_known,
    require_one_each,
    unwrapped,
)
from ._per_replica import (
    DistributedValues,
    PerReplica,
    is_distributed,
    loose,
    on_one_device,
    regroup,
    select_replica,
)
from ._sequential import run_sequentially

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from zstrat.strategy._frames import AbstractStrategy
    from zstrat.strategy.input._replica_batches import Share


class MeshLayout:
    """Places the values of replicas on a mesh: one value at each index of its first
    axis.

    Args:
        mesh: ``[replicas, ...]``; a replica has all devices at its index of the first
            axis.
    """

    def __init__(self, mesh: Mesh) -> None:
        grid = mesh.devices
        self.devices: tuple[jax.Device, ...] = tuple(grid.reshape(len(grid), -1)[:, 0])
        """The first device of each replica."""
        self._has_several = mesh.size > len(grid)
        self.rows: Any = SingleDeviceSharding(self.devices[0])
        """The sharding of an array ``[replicas * n, ...]`` of which each replica in
        turn has n rows."""
        if mesh.size > 1:
            made: Any = NamedSharding  # these two are untyped
            spec: Any = PartitionSpec
            # One replica has all rows, also of arrays without rows.
            self.rows = made(mesh, spec(AXIS) if len(grid) > 1 else spec())

    @property
    def replicas(self) -> int:
        return len(self.devices)

    def place(self, parts: Sequence[Any], *, is_fresh: bool = False) -> Any:
        """Puts the pytrees of all replicas on their devices, merged to one pytree.

        Args:
            parts: One pytree of arrays for each replica.
            is_fresh: Whether nothing else uses the memory of the arrays.

        Returns:
            A pytree of `PerReplica`. If the parts of a leaf have the same shape and
            dtype, it consists of one array over the devices, otherwise of the unchanged
            parts. With one replica the result is its pytree, on its device.

        Raises:
            ValueError: The pytrees have different structures.
        """
        if self.replicas == 1:
            return jax.tree.map(lambda array: self._put(array, is_fresh), parts[0])
        # Not `regroup`: to jax None is structure, as in the rows of a batch.
        return jax.tree.map(lambda *leaves: self.placed(leaves, is_fresh), *parts)

    def place_batch(self, batch: Any, *, is_fresh: bool = False) -> Any:
        """Puts a pytree of arrays ``[replicas * n, ...]`` on the devices. Rows are
        distributed in order: replica i gets n rows from ``i * n`` on.

        Args:
            is_fresh: As in `place`.

        Raises:
            ValueError: The rows of an array do not split evenly.
        """
        if self.replicas == 1:
            return jax.tree.map(lambda array: self._put(array, is_fresh), batch)
        return jax.tree.map(lambda array: self._distributed(array, is_fresh), batch)

    def _distributed(self, array: Any, is_fresh: bool) -> PerReplica:
        if is_known(array):
            return PerReplica.of_whole(self._put(array, is_fresh), self.replicas)
        return PerReplica(np.split(array, self.replicas))  # text stays here

    def place_share(self, share: Share) -> Any:
        """Puts the elements that the replicas draw in one step on their devices; as one
        batch if it splits evenly."""
        # A shape that no batch has any longer (a changed batch size) would keep its
        # memory.
        POOL.age(time.monotonic())
        whole = share.whole
        if whole is None:
            return self.place(share.parts, is_fresh=share.is_fresh)
        return self.place_batch(whole, is_fresh=share.is_fresh)

    def _put(self, array: Any, is_fresh: bool = False) -> Any:
        """Puts an array on the devices. Dtypes that devices do not know (text, dates)
        stay on the host, and so do 64-bit integers that jax would truncate."""
        if not is_known(array):
            return array
        if isinstance(array, np.ndarray):
            array = native(array)
        # Whole: a program that computes ids of rows from them refuses them.
        if not fits(array):
            return np.array(array)
        own = self._own(array, is_fresh)
        placed: jax.Array
        if isinstance(own, np.ndarray) and self.replicas > 1:
            # The same as below, with less overhead.
            slices = own.__getitem__
            placed = jax.make_array_from_callback(own.shape, self.rows, slices)
        else:
            placed = jax.device_put(own, self.rows)
        return placed

    def _own(self, array: Any, is_fresh: bool) -> Any:
        """Copies a numpy array if jax would use its memory directly, as the owner may
        write to it later. A fresh, aligned array is not copied."""
        if isinstance(array, jax.Array) or self.devices[0].platform != "cpu":
            return array
        source = np.asarray(array)
        if is_fresh and source.ctypes.data % ALIGNMENT == 0:
            return source
        # Aligned for jax, in memory that is reused when its arrays are gone: touching
        # fresh pages for each batch takes longer than copying it.
        copy = POOL.empty(source.shape, source.dtype)
        np.copyto(copy, source)
        return copy

    def placed(self, parts: Sequence[Any], is_fresh: bool = False) -> PerReplica:
        """Puts one array for each replica on the devices: one leaf of `place`."""
        arrays = [
            part if isinstance(part, jax.Array) else native(np.asarray(part))
            for part in parts
        ]
        kinds = {(array.shape, array.dtype) for array in arrays}
        # Not one array, so that the call runs replica by replica.
        if len(kinds) > 1 or not is_known(arrays[0]):
            return PerReplica(parts)
        is_scalar = arrays[0].ndim == 0
        is_key = jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key)
        # Joined by jax: numpy knows neither weak types nor random keys.
        if all(map(is_weak, arrays)) or (is_scalar and is_key):
            join = jnp.stack if is_scalar else jnp.concatenate
            whole = self._put(join(on_one_device(arrays)))
            return PerReplica.of_whole(whole, self.replicas, stacked=is_scalar)
        if is_scalar:
            whole = self._put(np.stack([np.asarray(array) for array in arrays]))
            return PerReplica.of_whole(whole, self.replicas, stacked=True)
        # A part belongs to several devices, which cut it or each have it whole: the
        # sharding says which.
        if self._has_several:
            joined = self._put(np.concatenate(arrays))
            return PerReplica.of_whole(joined, self.replicas)
        # Kept on the host, as in `_put`: jax would cut the integers.
        if not all(map(fits, arrays)):
            return PerReplica.of_whole(np.concatenate(arrays), self.replicas)
        own = [self._own(array, is_fresh) for array in arrays]
        there = jax.device_put(own, list(self.devices))
        return PerReplica.of_whole(self.joined(there), self.replicas)

    def joined(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Makes one array over the devices from one array on each device, without a
        copy."""
        return one_array(arrays, self.rows)


class _ReturnedVariable:
    """A variable that a function returns, as a pytree without leaves whose structure
    identifies the variable. (Comparing variables themselves would compare their
    values.)"""

    def __init__(self, variable: AbstractVariable) -> None:
        self.variable = variable
        self._key = type(variable), tuple([x.spec for x in variable.components])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ReturnedVariable) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)


jax.tree_util.register_pytree_node(
    _ReturnedVariable,
    lambda node: ((), node),
    lambda node, _: cast("Any", node.variable),
)


def returned(leaf: Any) -> Any:
    """Checks a leaf of the result of a function that is a separate step, and converts
    it to a form that a program can return.

    Raises:
        NeedsSequential: A program cannot return the leaf.
    """
    # Before the test for arrays: a variable acts as one.
    if isinstance(leaf, AbstractVariable):
        return _ReturnedVariable(leaf)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise NeedsSequential("it returns a random key")
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, *_PLAIN)):
        return leaf
    raise NeedsSequential(f"it returns a {type(leaf).__name__}")


_PLAIN: Final = (bool, int, float, complex, str, bytes)


_log: Final = logging.getLogger(__name__)

# jax's stubs leave it untyped.
_spec: Final[Any] = PartitionSpec


class LocalMesh:
    """The devices of this process on which the replicas of one strategy run.

    Args:
        strategy: The strategy to which the replicas belong.
        devices: One for each replica, at least one; or an array ``[replicas, ...]`` of
            devices, if each replica has several.
        axes: Names of the axes after the first one.
        is_compiled: Whether only programs run: sequential replicas are traced, and a
            function that cannot be traced is refused.
    """

    def __init__(
        self,
        strategy: AbstractStrategy,
        devices: Any,
        axes: Sequence[str] = (),
        *,
        is_compiled: bool = False,
    ) -> None:
        grid = np.array(devices, dtype=object)
        self.mesh = Mesh(grid, (AXIS, *axes))
        self.layout = MeshLayout(self.mesh)
        self.devices: tuple[jax.Device, ...] = self.layout.devices
        self.team = Team(len(grid))
        self._strategy = strategy
        self._is_compiled = is_compiled
        self._cache = FunctionCache(self._as_step)
        # A single device that jax would not choose. With several, the mesh of the
        # program decides.
        is_usual = self.devices[0] == jax.local_devices()[0]
        self._is_elsewhere = grid.size == 1 and not is_usual

    @property
    def replicas(self) -> int:
        return len(self.devices)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs ``fn`` on all replicas and merges their results; called in the
        strategy's scope.

        Raises:
            TypeError: A function that must be compiled returns a value that a program
                cannot return.
            Exception: Whatever ``fn`` raises.
        """
        current = recorder.get()
        # An eager step: values are real, and Python may look at them.
        if current is not None and current.live:
            return self._run_sequentially(self._call(fn, args, kwargs))
        # Already inside of a program that is traced: the replicas become a part of it.
        if current is not None or is_staging():
            return self._staged(self._call(fn, args, kwargs))
        kept = self._cache.step_of(fn)
        # Known from an earlier call: a function that cannot be one program is not
        # traced again.
        if kept.why_not is None:
            try:
                values, named = self._given((tuple(args), dict(kwargs)))
                with self._there():
                    return run_as(kept.step, fn, values, named)
            except NeedsSequential as found:
                if self._is_compiled:
                    raise TypeError(
                        f"{kept.step.name} is compiled, and {found}: a program returns "
                        "arrays, numbers, strings and None"
                    ) from None
                kept.why_not = str(found)
                _log.info("%s runs replica by replica: %s", kept.step.name, found)
            except UnevenParts:
                pass  # in this call: the last batch of a dataset, for example, or text
        return self._run_sequentially(self._call(fn, args, kwargs))

    def _call(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ReplicaCall:
        return ReplicaCall(self._strategy, self.team, fn, args, kwargs)

    def _there(self) -> AbstractContextManager[Any]:
        """Makes computations on arrays that are bound to no device run on the
        strategy's only device, in the block."""
        if not self._is_elsewhere:
            return nullcontext()
        on: AbstractContextManager[Any] = jax.default_device(self.devices[0])
        return on

    def _run_sequentially(self, call: ReplicaCall) -> Any:
        require_all_one_each(call.tree, self.replicas)
        near = call.given(joined.mapped(self._near, call.tree))
        results = run_sequentially(near, self.devices)
        return results[0] if self.replicas == 1 else regroup(results, self._merged)

    def _merged(self, parts: Sequence[Any]) -> PerReplica:
        """Merges the results of sequential replicas: into one array over the devices if
        each part is on the device of its replica."""
        if not all(isinstance(part, jax.Array) for part in parts):
            return PerReplica(parts)
        kinds = {(part.shape, part.dtype) for part in parts}
        where = [
            None if isinstance(part, jax.core.Tracer) else part.devices()
            for part in parts
        ]
        # Scalars and weak types are not rows over devices; another device would mean a
        # copy.
        if (
            len(kinds) > 1
            or parts[0].ndim == 0
            or any(map(is_weak, parts))
            or where != [{device} for device in self.devices]
        ):
            return PerReplica(parts)
        return PerReplica.of_whole(self.layout.joined(parts), self.replicas)

    @staticmethod
    def _near(leaf: Any) -> Any:
        """Converts an array that all devices have to one that each device can compute
        with; returns other leaves unchanged."""
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return leaf
        if len(leaf.devices()) == 1 or not leaf.is_fully_replicated:
            return leaf
        return loose(leaf.addressable_shards[0].data, weak=is_weak(leaf))

    def _as_step(self) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            way = self._staged if self._is_compiled else self._traced
            return joined.mapped(returned, way(self._call(given(), args, kwargs)))

        return step

    def _staged(self, call: ReplicaCall) -> Any:
        """Runs the replicas as a part of the program that is being traced: as one
        program, or traced sequentially."""
        try:
            return self._traced(call)
        except (NeedsSequential, UnevenParts):
            return self._run_sequentially(call)

    def _traced(self, call: ReplicaCall) -> Any:
        if self.replicas > 1:
            return as_one_program(call, self.mesh)
        require_all_one_each(call.tree, 1)
        return alone(call.given(unwrapped(select_replica(0, call.tree))))

    def _given(self, tree: Any) -> Any:
        """Converts the arguments of ``run`` to those of a separate step: values per
        replica are put on their devices, and Python numbers are marked to stay numbers.

        Raises:
            UnevenParts: The arguments contain text, for example. (If the strategy only
                runs programs, the step raises the error instead.)
        """
        if not self._is_compiled:
            require_known(tree)
        return jax.tree.map(self._given_leaf, tree, is_leaf=is_distributed)

    def _given_leaf(self, leaf: Any) -> Any:
        if type(leaf) in NUMBERS:
            return Plain(leaf)
        require_one_each(leaf, self.replicas)
        is_traced = isinstance(leaf, jax.core.Tracer)  # the step refuses it later
        # A program refuses an array on other devices than its own, instead of moving
        # it.
        if isinstance(leaf, jax.Array) and not is_traced and leaf.committed:
            return jax.device_put(leaf, self._everywhere(leaf))
        if not isinstance(leaf, DistributedValues) or leaf.whole is not None:
            return leaf
        return regroup(leaf.values, self._given_parts, always_wrap=True)

    def _everywhere(self, array: jax.Array) -> Any:
        """Returns the sharding with which an array bound to devices is given to all
        replicas: its own sharding if it is on all of their devices."""
        if self.replicas == 1:
            return self.layout.rows
        if array.sharding.device_set == set(self.mesh.devices.flat):
            return array.sharding
        made: Any = NamedSharding  # untyped
        return made(self.mesh, _spec())

    def _given_parts(self, parts: Sequence[Any]) -> Any:
        numbers = [Plain(part) for part in parts if type(part) in NUMBERS]
        if len(numbers) == len(parts):
            # Equal numbers stay a number of Python, a constant of weak type as on one
            # device; else they would retrace or change the dtype of results.
            if len(set(numbers)) == 1:
                return numbers[0]
            if all(fits(np.asarray(part)) for part in parts):
                parts = [jnp.asarray(part) for part in parts]
        return self.layout.placed(parts)
