"""The replicas of one process on its devices: how ``run`` runs them and merges results.

A replica function runs in one of two ways, with the same results.

- *As one program* for all replicas, compiled. In a step it is a part of the step;
  elsewhere it becomes a separate step, which only runs it, and is cached.
- *Sequentially* (`_fibers`), replica by replica, if it is not a pure function of
  arrays: if it calls ``merge_call``; if Python looks at a value in it (a branch,
  ``int``, ``numpy``); if it creates variables; if replicas are given, or return, what
  cannot be one array; if it is a ``zs.function(eager=True)``.

Law of the file: tracing decides which way it is; no function runs twice.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zstrat.program.trace import Plain, fits, joined
from zstrat.variables import AbstractVariable, is_staging, is_weak, recorder

from ._collective import AXIS, Team
from ._fibers import NeedsSequential
from ._function_cache import FunctionCache, given, run_as
from ._layout import MeshLayout
from ._one_program import (
    NUMBERS,
    ReplicaCall,
    UnevenParts,
    alone,
    as_one_program,
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
    regroup,
    select_replica,
)
from ._sequential import run_sequentially

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from zstrat.strategy._abstract import AbstractStrategy


class _ReturnedVariable:
    """A variable that a function returns: a pytree without leaves, whose structure says
    which variable it is. (Two variables are equal where their values are.)"""

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
    """Checks a leaf of the result of a function that is a step of its own.

    Raises:
        NeedsSequential: A program cannot return it.
    """
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
    """The devices of this process that the replicas of one strategy run on.

    Args:
        strategy: Whose replicas they are.
        devices: One for each replica, at least one; or an array ``[replicas, ...]`` of
            them, of which each replica has several.
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
        """Runs the replicas and merges what they return; called in the strategy's
        scope.

        Raises:
            TypeError: A function that must be compiled returns a value that a program
                cannot return.
            Exception: Whatever ``fn`` raises.
        """
        current = recorder.get()
        if current is not None and current.live:
            return self._run_sequentially(self._call(fn, args, kwargs))
        if current is not None or is_staging():
            return self._staged(self._call(fn, args, kwargs))
        kept = self._cache.step_of(fn)
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
        """Computes what is bound to no device on the only device of the strategy, while
        entered."""
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
        """Merges the results of sequential replicas: into one array, if each part is on
        the device of its replica."""
        if not all(isinstance(part, jax.Array) for part in parts):
            return PerReplica(parts)
        kinds = {(part.shape, part.dtype) for part in parts}
        where = [
            None if isinstance(part, jax.core.Tracer) else part.devices()
            for part in parts
        ]
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
        """Returns an array that all devices have as one that each of them can compute
        with."""
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
        """Runs the replicas as a part of the program that is being traced, as one
        program or sequentially."""
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
        """Returns the arguments of a step of its own: values per replica on their
        devices, and Python numbers as such.

        Raises:
            UnevenParts: Text is among them, for example. Where only programs run, the
                step refuses it.
        """
        if not self._is_compiled:
            require_known(tree)
        return jax.tree.map(self._given_leaf, tree, is_leaf=is_distributed)

    def _given_leaf(self, leaf: Any) -> Any:
        if type(leaf) in NUMBERS:
            return Plain(leaf)
        require_one_each(leaf, self.replicas)
        is_traced = isinstance(leaf, jax.core.Tracer)  # the step refuses it later
        if isinstance(leaf, jax.Array) and not is_traced and leaf.committed:
            return jax.device_put(leaf, self._everywhere(leaf))
        if not isinstance(leaf, DistributedValues) or leaf.whole is not None:
            return leaf
        return regroup(leaf.values, self._given_parts, always_wrap=True)

    def _everywhere(self, array: jax.Array) -> Any:
        """Returns the sharding of an array that is bound to devices and given to all
        replicas: its own, if all of them are there."""
        if self.replicas == 1:
            return self.layout.rows
        if array.sharding.device_set == set(self.mesh.devices.flat):
            return array.sharding
        made: Any = NamedSharding  # untyped
        return made(self.mesh, _spec())

    def _given_parts(self, parts: Sequence[Any]) -> Any:
        numbers = [Plain(part) for part in parts if type(part) in NUMBERS]
        if len(numbers) == len(parts):
            if len(set(numbers)) == 1:
                return numbers[0]
            if all(fits(np.asarray(part)) for part in parts):
                parts = [jnp.asarray(part) for part in parts]
        return self.layout.placed(parts)
