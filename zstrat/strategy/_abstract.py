"""The interfaces through which strategies and their contexts know each other.

A strategy makes the contexts of its replicas, and a context knows its strategy. These
classes have the methods that the rest of the package calls, so that neither file
imports the other.

Law of the file: of this package it imports the `Team` alone, so that every file of the
package may import it.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    import jax

    from zstrat.collectives import ReduceOp
    from zstrat.data import InputContext

    from .replica._collective import Team


class AbstractStrategy(abc.ABC):
    """A strategy as the code that runs under it sees it. `zs.Strategy` is
    the only subclass and documents the methods."""

    is_default: bool = False
    """Whether it is the one that is current where none was entered."""

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are summed before they leave a worker."""

    @property
    @abc.abstractmethod
    def extended(self) -> Any:
        """The `StrategyExtended` of this strategy."""
        # `Any`: that class imports the contexts, which import this file.

    @abc.abstractmethod
    def scope(self) -> AbstractContextManager[AbstractStrategy]:
        """Makes the strategy current."""

    @property
    @abc.abstractmethod
    def cluster_resolver(self) -> Any:
        """The resolver that it was made from, or None."""

    @abc.abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        """Calls ``fn`` once per local replica."""

    @abc.abstractmethod
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Reduces the values of the replicas to one."""

    @abc.abstractmethod
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns one entry per local replica."""

    @abc.abstractmethod
    def gather(self, value: Any, axis: Any) -> Any:
        """Concatenates the values of the replicas along ``axis``."""

    @abc.abstractmethod
    def experimental_distribute_dataset(
        self, dataset: Any, options: Any = None
    ) -> Iterable[Any]:
        """Shares a dataset of global batches out among all replicas."""

    @abc.abstractmethod
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Iterable[Any]:
        """Calls a function that makes a dataset in each worker."""

    @abc.abstractmethod
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[..., Any]
    ) -> Any:
        """Calls ``value_fn`` for each replica."""

    @abc.abstractmethod
    def _devices(self) -> Sequence[jax.Device]:
        """Returns devices of this process for replicas, one each; fewer is fine."""

    @abc.abstractmethod
    def _team(self) -> Team:
        """Returns the replicas that compute together."""


class AbstractReplicaContext(abc.ABC):
    """The context of a replica, as the code that stores or looks up the current one
    sees it. `ReplicaContext` is the only subclass."""

    @property
    @abc.abstractmethod
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """The number of the replica, traced where several are one program."""

    @abc.abstractmethod
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``merge_fn(strategy, *args)`` once, in the cross-replica context."""
