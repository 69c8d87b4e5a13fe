"""Resolvers: where a process gets the tasks of its cluster and its own task from.

A resolver returns the tasks of the cluster, the task of this process, the address of a
task, and its accelerators. It is queried again whenever the answer may have changed, so
it must be cheap: it reads the environment, a file, or sends one request, with a
deadline, to a service. It never connects to the tasks. `UnionResolver` combines
several, such as workers from a scheduler and ps from a file.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar, Protocol, final, runtime_checkable

from ._roles import normalize_cluster_spec
from ._spec import ClusterSpec, task_index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zstrat.config import Settings


class ClusterResolver(abc.ABC):
    """Base class of resolvers, also of yours: implement `cluster_spec` and `master`.

    ``task_type`` and ``task_id`` are the task of this process, None if unknown;
    ``rpc_layer`` is the scheme that `master` puts in front of an address.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns all currently known tasks of the cluster."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default this one, with the scheme if
        any."""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the number of accelerators of each kind for one task. Empty by
        default: workers report their devices when a coordinator connects to them."""
        return {}

    @property
    def may_change(self) -> bool:
        """Whether `cluster_spec` may return another cluster later. A training program
        then queries it regularly, on a separate thread, to follow its workers."""
        return True

    @property
    def environment(self) -> str:
        """The environment of this process ("google", ...), "" if unknown."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process ("worker", "ps", ...): the value that was set, or
        else that of the source; None if unknown."""
        # 0 and "" are values: only None asks the source.
        given = self._task_type
        return self._found_task_type() if given is None else str(given)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job: the value that was set, or else that of
        the source; None if unknown.

        Raises:
            ValueError: The value that was set is not an index.
        """
        given = self._task_id
        # Accepts "1", as programs often pass a variable of their environment.
        return self._found_task_id() if given is None else task_index(given, "task_id")

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        given = self._rpc_layer
        return self._found_rpc_layer() if given is None else given

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _found_task_type(self) -> str | None:
        return None

    def _found_task_id(self) -> int | None:
        return None

    def _found_rpc_layer(self) -> str | None:
        return None


class SourceResolver(ClusterResolver):
    """Base class of the resolvers of this package, each with its own source.

    Values that the program passes to the constructor or a setter take precedence over
    the source; None means the value of the source, and 0 and "" are values.

    A subclass implements `cluster_spec`, and the methods ``_found_...`` and
    `_accelerators` for which its source has answers. They are called at each query, so
    that a changed source is read again, and an error in the source is raised only by
    the queries that need the wrong part.
    """

    _may_change: ClassVar[bool] = False
    """Whether the source may describe another cluster later."""

    _empty_layer_counts: ClassVar[bool] = False
    """Whether ``rpc_layer=""`` makes `master` return an address without a scheme, as in
    TensorFlow for TF_CONFIG and SageMaker. Other resolvers treat "" like None."""

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._environment = environment

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default of this one; "" if unknown.

        Raises:
            ValueError: The cluster has no such task.
            Also the errors of `cluster_spec`.
        """
        job, index = self._asked(task_type, task_id)
        # Before the query, which may be one of a service.
        if job is None or index is None:
            return ""
        return self._with_layer(self.cluster_spec().task_address(job, index), rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the number of accelerators of each kind, the same for every task;
        empty if unknown."""
        return dict(self._accelerators())

    @property
    def may_change(self) -> bool:
        return self._may_change

    @property
    def environment(self) -> str:
        given = self._environment
        return (self._found_environment() or "") if given is None else given

    def _found_environment(self) -> str | None:
        return None

    def _accelerators(self) -> Mapping[str, int]:
        return {}

    def _asked(
        self, task_type: str | None, task_id: int | None
    ) -> tuple[str | None, int | None]:
        """Replaces a type or id that is None by that of the task of this process."""
        job = self.task_type if task_type is None else task_type
        return job, self.task_id if task_id is None else task_id

    def _with_layer(self, address: str, rpc_layer: str | None) -> str:
        """Puts the given scheme, or else that of this resolver, before an address."""
        given = rpc_layer is not None if self._empty_layer_counts else bool(rpc_layer)
        layer = rpc_layer if given else self.rpc_layer
        return with_scheme(address, layer)


def with_scheme(address: str, rpc_layer: str | None) -> str:
    """Puts ``rpc_layer://`` in front of the address, if there is a layer."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


@final
class SimpleClusterResolver(SourceResolver):
    """Returns fixed values: a cluster, a task and a master that the program passes.

    Args:
        master: The address that `master` returns by default.
        num_accelerators: Kind -> count, the same for every task.

    Raises:
        TypeError: ``cluster_spec`` is not a ClusterSpec, or ``master`` not a string.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                "cluster_spec must be a `ClusterSpec`, got "
                f"{type(cluster_spec).__name__}: write ClusterSpec({{...}})"
            )
        if not isinstance(master, str):
            raise TypeError(f"master must be a string, got {type(master).__name__}")
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._spec, self._master = cluster_spec, master
        self._given = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task if type and id are given, else the fixed one.

        Raises:
            ValueError: The cluster has no such task.
        """
        # Not the task of this process: TensorFlow returns the fixed address then.
        if task_type is None or task_id is None:
            return self._with_layer(self._master, rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def _accelerators(self) -> Mapping[str, int]:
        return self._given


def query_cluster_spec(resolver: ClusterResolver) -> ClusterSpec:
    """Returns the cluster of a resolver that a program passed.

    Raises:
        TypeError: The argument is not a resolver; suggests one.
    """
    # People pass a `LocalCluster` or a fleet where only a resolver will do.
    if not isinstance(resolver, ClusterResolver):
        inner = getattr(resolver, "resolver", None)
        hint = (
            "pass its .resolver"
            if isinstance(inner, ClusterResolver)
            else "use one of zs.cluster_resolver, such as SimpleClusterResolver"
        )
        raise TypeError(
            f"cluster_resolver: expected a ClusterResolver, got "
            f"{type(resolver).__name__}: {hint}"
        )
    return normalize_cluster_spec(resolver.cluster_spec())


@final
class UnionResolver(SourceResolver):
    """The union of the clusters of other resolvers.

    If a job is a list in all of them, the lists are concatenated in the order of the
    arguments; otherwise the job is merged by index. The task of this process, the
    environment and the accelerators are those of the first resolver.

    Raises:
        ValueError: There are no resolvers, or an unknown keyword.
        TypeError: An argument is not a resolver.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
        **unknown: object,
    ) -> None:
        if unknown:  # a ValueError as in TensorFlow, not Python's TypeError
            raise ValueError(f"Unexpected kwargs provided {unknown!r}")
        if not resolvers:
            raise ValueError("At least one ClusterResolver is required.")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    "All arguments must be a sub-class of `ClusterResolver`, "
                    f"got {type(resolver).__name__}"
                )
        super().__init__(task_type, task_id, rpc_layer)
        self._resolvers = resolvers

    def cluster_spec(self) -> ClusterSpec:
        """Merges the clusters of all resolvers.

        Raises:
            KeyError: Two clusters have the same index of a job that is merged by index.
        """
        # Each resolver is asked once, so that all jobs are of the same answer.
        merged: dict[str, list[str] | dict[int, str]] = {}
        parts = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        for job in dict.fromkeys(job for part in parts for job in part):
            merged[job] = _merge(job, [part[job] for part in parts if job in part])
        return ClusterSpec(merged)

    @property
    def may_change(self) -> bool:
        return any(resolver.may_change for resolver in self._resolvers)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task if type and id are given, else the `master` of
        the first resolver.

        Raises:
            ValueError: The union has no such task.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        address = self.cluster_spec().task_address(task_type, task_id)
        # Not the layer of the first resolver: the address may be of another one.
        return with_scheme(address, rpc_layer or self._rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    def _found_task_type(self) -> str | None:
        return self._resolvers[0].task_type

    def _found_task_id(self) -> int | None:
        return self._resolvers[0].task_id

    def _found_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer

    def _found_environment(self) -> str | None:
        return self._resolvers[0].environment


def _merge(
    job: str, parts: list[list[str] | dict[int, str]]
) -> list[str] | dict[int, str]:
    parts = [part for part in parts if part]  # empty jobs have no kind
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        # Two addresses for one task cannot both be right, and neither is better.
        if twice := sorted(merged.keys() & tasks.keys()):
            raise KeyError(
                "Duplicate keys detected when merging two ClusterSpecs: "
                f"{twice} of job {job!r}"
            )
        merged |= tasks
    return merged


@final
class FunctionClusterResolver(SourceResolver):
    """A resolver that calls a function at each query, as the result may change, such as
    the addresses of a fleet.

    Args:
        ask: Returns all tasks of the cluster.
    """

    _may_change = True

    def __init__(self, ask: Callable[[], ClusterSpec]) -> None:
        super().__init__()
        self._ask = ask

    def cluster_spec(self) -> ClusterSpec:
        return self._ask()


@runtime_checkable
class RunningCluster(Protocol):
    """A cluster that was started for this program, such as `zs.LocalCluster` and the
    fleets of `zs.launch`. It runs as long as this object is referenced."""

    @property
    def resolver(self) -> ClusterResolver:
        """A resolver with the current addresses of the tasks."""
        ...

    @property
    def settings(self) -> Settings:
        """The keys and other settings with which a program connects to the tasks."""
        ...
