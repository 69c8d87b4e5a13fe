"""Where the programs run with zstrat, and how each place is asked for a step.

A *home* makes variables and optimizers of a batch of cases and takes one step of all of
them. In a replica each gets its share of the elements of the gradients, so that the
sum over the replicas is the gradient to the last bit, and no share is like another.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from optax_model import Rows, path_of
from optax_recipes import FUNCTIONS, Case

import zstrat as zs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Member:
    """One case in its home; what a step needs of it and no more."""

    optimizer: Any
    variables: Any
    functions: dict[str, Any]
    is_of_examples: bool


def member(case: Case, start: Any, *, knows_its_tree: bool) -> Member:
    """Made in the scope of a strategy. The optimizer is given its tree, or meets it in
    the first call."""
    variables = jax.tree_util.tree_map_with_path(
        lambda path, leaf: zs.Variable(leaf, name=path_of(path)), start
    )
    given = {"params": variables} if knows_its_tree else {}
    optimizer = zs.Optimizer(case.make(), **given)
    functions = {word: FUNCTIONS[word] for word in case.extra if word in FUNCTIONS}
    is_of_examples = case.gradients == "of examples"
    return Member(optimizer, variables, functions, is_of_examples)


def apply(
    members: list[Member], brought: Any, share: Callable[[Any, Member], Any], **how: Any
) -> None:
    """One call of each optimizer; ``brought``: gradients and arrays for each."""
    for one, (gradients, arrays) in zip(members, brought, strict=True):
        one.optimizer.apply_gradients(
            share(gradients, one), one.variables, **how, **arrays, **one.functions
        )


def _sliced(leaf: Any, share: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, Rows):
        return zs.IndexedSlices(share(leaf.values), leaf.indices)
    return share(leaf)


def _mapped(gradients: Any, share: Callable[[Any], Any]) -> Any:
    return jax.tree.map(
        lambda leaf: _sliced(leaf, share),
        gradients,
        is_leaf=lambda node: isinstance(node, Rows),
    )


def whole(gradients: Any, one: Member) -> Any:
    del one
    return _mapped(gradients, lambda leaf: leaf)


def shared(gradients: Any, one: Member) -> Any:
    """This replica's elements, and zeros instead of the others'; or its examples."""
    context = zs.get_replica_context()
    index, count = context.replica_id_in_sync_group, context.num_replicas_in_sync

    def examples(leaf: Any) -> Any:
        mine = leaf.shape[0] // count
        return jax.lax.dynamic_slice_in_dim(leaf, index * mine, mine)

    def mine(leaf: Any) -> Any:
        numbers = np.arange(np.size(leaf)).reshape(np.shape(leaf))
        return jnp.where(numbers % count == index, leaf, jnp.zeros_like(leaf))

    return _mapped(gradients, examples if one.is_of_examples else mine)


def values_of(one: Member) -> Any:
    """The values of a case, as numpy arrays, in its tree."""
    return jax.tree.map(lambda variable: np.asarray(variable.numpy()), one.variables)


@dataclass(frozen=True)
class Home:
    """Where variables live and steps run.

    Args:
        scope: Enters the strategy.
        stepper: Of members: what takes one step with all that it brings.
    """

    name: str
    scope: Callable[[], Any]
    stepper: Callable[[list[Member]], Callable[[Any], None]]
    knows_its_tree: bool = True
    is_in_process: bool = True
    batch: int = 12


def _eager(members: list[Member]) -> Callable[[Any], None]:
    return lambda brought: apply(members, brought, whole)


def _in_a_function(members: list[Member]) -> Callable[[Any], None]:
    @zs.function
    def train_step(brought: Any) -> None:
        apply(members, brought, whole)

    return train_step


def _in_replicas(strategy: Any) -> Callable[[list[Member]], Callable[[Any], None]]:
    def stepper(members: list[Member]) -> Callable[[Any], None]:
        @zs.function
        def train_step(brought: Any) -> None:
            strategy.run(lambda mine: apply(members, mine, shared), args=(brought,))

        return train_step

    return stepper


def _reduced_before(strategy: Any) -> Callable[[list[Member]], Callable[[Any], None]]:
    """Each replica has the whole gradients, as after an all-reduce of its own."""

    def stepper(members: list[Member]) -> Callable[[Any], None]:
        @zs.function
        def train_step(brought: Any) -> None:
            def replica(mine: Any) -> None:
                apply(members, mine, whole, aggregate_gradients=False)

            strategy.run(replica, args=(brought,))

        return train_step

    return stepper


def _outside(strategy: Any) -> Callable[[list[Member]], Callable[[Any], None]]:
    """In the scope, between steps: the gradients are whole already."""

    def stepper(members: list[Member]) -> Callable[[Any], None]:
        def take(brought: Any) -> None:
            with strategy.scope():
                apply(members, brought, whole)

        return take

    return stepper


def _pair(name: str, strategy: Any) -> list[Home]:
    inside = _in_replicas(strategy), _outside(strategy)
    return [
        Home(f"{name}, in a step", strategy.scope, inside[0]),
        Home(f"{name}, outside", strategy.scope, inside[1], knows_its_tree=False),
    ]


def _mirrored() -> list[Home]:
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    reduced = "Mirrored, reduced before"
    return [
        *_pair("Mirrored", strategy),
        Home(reduced, strategy.scope, _reduced_before(strategy)),
    ]


def _none() -> list[Home]:
    return [
        Home("no scope, in a step", contextlib.nullcontext, _in_a_function),
        Home("no scope, outside", contextlib.nullcontext, _eager, knows_its_tree=False),
    ]


IN_PROCESS: dict[str, Callable[[], list[Home]]] = {
    "none": _none,
    "none_in_a_step": lambda: _none()[:1],
    "one_device": lambda: _pair("OneDevice", zs.OneDeviceStrategy("CPU:0")),
    "mirrored": _mirrored,
    "multi_worker": lambda: _pair(
        "MultiWorkerMirrored", zs.MultiWorkerMirroredStrategy()
    ),
    "tpu": lambda: _pair(
        "TPU", zs.TPUStrategy(zs.cluster_resolver.TPUClusterResolver("local"))
    ),
    "central": lambda: _pair(
        "CentralStorage", zs.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:0")
    ),
}


def _scheduled(coordinator: Any) -> Callable[[list[Member]], Callable[[Any], None]]:
    """One step in flight: the next is scheduled when this one is done."""

    def stepper(members: list[Member]) -> Callable[[Any], None]:
        step = _in_a_function(members)

        def take(brought: Any) -> None:
            coordinator.schedule(step, args=(brought,))
            coordinator.join()

        return take

    return stepper


@contextlib.contextmanager
def servers(*kinds: str) -> Iterator[list[Home]]:
    """Two parameter servers and a worker, and homes of these kinds on them: ``whole``
    variables, ``partitioned`` ones, ``some cut``, in steps; and whole ones ``outside``.
    """
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(zs.LocalCluster(num_ps=2, num_workers=1))
        cut = _Cut()
        strategy = stack.enter_context(
            zs.ParameterServerStrategy(cluster.resolver, variable_partitioner=cut)
        )
        stepper = _scheduled(zs.ClusterCoordinator(strategy))

        def home(kind: str) -> Home:
            @contextlib.contextmanager
            def scope() -> Iterator[None]:
                cut.kind = kind
                with strategy.scope():
                    yield

            is_outside = kind == "outside"
            return Home(
                f"servers, {kind}",
                scope,
                _eager if is_outside else stepper,
                knows_its_tree=not is_outside,
                is_in_process=False,
            )

        yield [home(kind) for kind in kinds]


class _Cut:
    """A partitioner: in two along the rows, or not."""

    kind = "whole"

    def __call__(self, shape: Any, dtype: Any) -> list[int]:
        del dtype
        cuts = {"partitioned": shape, "some cut": len(shape) == 2 and shape[0] == 6}
        return [2 if n == 0 and cuts.get(self.kind) else 1 for n in range(len(shape))]


ON_SERVERS = {
    "servers": ("whole", "partitioned", "outside"),
    "servers_in_steps": ("whole", "partitioned"),
    "servers_some_cut": ("some cut",),
}


def home_of_rank(strategy: Any, rank: int) -> Home:
    """Of one rank of several: all of them run the same program at the same time."""
    name = f"MultiWorkerMirrored, rank {rank}"
    return Home(name, strategy.scope, _in_replicas(strategy))


def homes_of(name: str, stack: contextlib.ExitStack) -> list[Home]:
    """Of a name that the command line knows."""
    if name in ON_SERVERS:
        return stack.enter_context(servers(*ON_SERVERS[name]))
    return IN_PROCESS[name]()
