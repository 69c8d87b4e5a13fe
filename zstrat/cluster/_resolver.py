"""Where a process learns who is in its cluster, and who it is itself.

A resolver answers four questions: which tasks there are, which one this process is, the
address of a task, and its accelerators. It is asked again whenever the answer may have
changed, so it must be cheap: the environment, a file, or one question to the service
that knows, with a deadline. It never connects to the tasks themselves. Several may be
one, a `UnionResolver`: say, workers from a scheduler and ps from a file.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar, Protocol, final, runtime_checkable

from ._spec import ClusterSpec, normalize_cluster_spec, task_index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zstrat.config import Settings


class ClusterResolver(abc.ABC):
    """Base of all resolvers, and of your own: write `cluster_spec` and `master`.

    ``task_type`` and ``task_id`` say who this process is, None where that is not known;
    ``rpc_layer`` is the scheme that `master` puts before an address.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """All tasks of the cluster, as far as they are known now."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Address of a task, by default this one, with its scheme if there is one."""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Kind -> count for one task. Empty here: a worker says what devices it has
        when it is connected, and no resolver connects."""
        return {}

    @property
    def may_change(self) -> bool:
        """Whether `cluster_spec` may answer otherwise later. A program that trains asks
        again then, on a thread of its own, and follows its workers."""
        return True

    @property
    def environment(self) -> str:
        """Where this process runs ("google", ...), "" for nowhere special."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job that this process is a task of ("worker", "ps", ...): as it was set,
        else as the resolver finds it; None if it is not known."""
        said = self._task_type
        return self._found_task_type() if said is None else str(said)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job, from 0: as it was set, else as the
        resolver finds it; None if it is not known.

        Raises:
            ValueError: What was set is no such number.
        """
        said = self._task_id
        # Programs say what they find in their environment, which is a text: "1" is 1.
        return self._found_task_id() if said is None else task_index(said, "task_id")

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        said = self._rpc_layer
        return self._found_rpc_layer() if said is None else said

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
    """Base of the resolvers of this package: each has its own source of the cluster.

    What the program says, to the constructor or to a setter, goes before what the
    source says; None leaves the answer to the source, and 0 and "" are values.

    A subclass writes `cluster_spec`, and those of the methods ``_found_...`` and
    `_accelerators` whose answers its source knows. They are called at each question, so
    a source that changes is read anew, and a mistake in one of its answers is raised by
    the question for that answer alone.
    """

    _may_change: ClassVar[bool] = False
    """Whether the source may tell of another cluster later: what says who is in it, not
    how the process was started."""

    _empty_layer_counts: ClassVar[bool] = False
    """Whether ``rpc_layer=""`` asks `master` for an address without a scheme. It does
    by TensorFlow's rules for TF_CONFIG and SageMaker, and for our own files; the other
    resolvers of TensorFlow take "" like None."""

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
        """Address of the task, by default of this one; "" if this one is not known.

        Raises:
            ValueError: The cluster has no such task.
            Also what `cluster_spec` raises.
        """
        job, index = self._asked(task_type, task_id)
        if job is None or index is None:
            return ""
        return self._with_layer(self.cluster_spec().task_address(job, index), rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Kind -> count, the same for every task; empty if the source does not know."""
        return dict(self._accelerators())

    @property
    def may_change(self) -> bool:
        return self._may_change

    @property
    def environment(self) -> str:
        said = self._environment
        return (self._found_environment() or "") if said is None else said

    def _found_environment(self) -> str | None:
        return None

    def _accelerators(self) -> Mapping[str, int]:
        return {}

    def _asked(
        self, task_type: str | None, task_id: int | None
    ) -> tuple[str | None, int | None]:
        """The task that is meant: this one, in what is None."""
        job = self.task_type if task_type is None else task_type
        return job, self.task_id if task_id is None else task_id

    def _with_layer(self, address: str, rpc_layer: str | None) -> str:
        """The address with the scheme that was asked for, else with this resolver's."""
        given = rpc_layer is not None if self._empty_layer_counts else bool(rpc_layer)
        layer = rpc_layer if given else self.rpc_layer
        return with_scheme(address, layer)


def with_scheme(address: str, rpc_layer: str | None) -> str:
    """The address behind ``rpc_layer://``, or as it is without one."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


@final
class SimpleClusterResolver(SourceResolver):
    """Answers with what it was given.

    Args:
        master: The address that `master` returns when it is not asked for a task.
        num_accelerators: Kind -> count, the same for every task.

    Raises:
        TypeError: ``cluster_spec`` is no ClusterSpec, or ``master`` no string.
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
        """Address of the task if type and id are given, else the fixed one.

        Raises:
            ValueError: The cluster has no such task.
        """
        if task_type is None or task_id is None:
            return self._with_layer(self._master, rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def _accelerators(self) -> Mapping[str, int]:
        return self._given


def cluster_spec_of(resolver: ClusterResolver) -> ClusterSpec:
    """What a resolver that a program gave says now.

    Raises:
        TypeError: It is none; says where one is to be had.
    """
    if not isinstance(resolver, ClusterResolver):
        have = getattr(resolver, "resolver", None)
        hint = (
            "give its .resolver"
            if isinstance(have, ClusterResolver)
            else ("zs.cluster_resolver has several, SimpleClusterResolver for one")
        )
        raise TypeError(
            f"cluster_resolver: expected a ClusterResolver, got "
            f"{type(resolver).__name__}: {hint}"
        )
    return normalize_cluster_spec(resolver.cluster_spec())


@final
class UnionResolver(SourceResolver):
    """The union of the clusters of other resolvers.

    A job that is a list in all of them is their concatenation, in the order of the
    arguments; if one of them gives it by index, it is merged by index. Where it has no
    tasks it adds nothing. What is no matter of the cluster (this task, environment,
    accelerators) the first one answers.

    Raises:
        ValueError: No resolver, or an unknown keyword.
        TypeError: One is no resolver.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
        **unknown: object,
    ) -> None:
        if unknown:  # Python would say TypeError, TensorFlow says ValueError
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
        """
        Raises:
            KeyError: Two clusters have the same index of a job that is merged by index.
        """
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
        """Address of the task if type and id are given, else what the first one says.

        Raises:
            ValueError: The union has no such task.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        address = self.cluster_spec().task_address(task_type, task_id)
        # Not the first one's layer: the address may be another resolver's.
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
    parts = [part for part in parts if part]  # what is empty is neither kind
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        if twice := sorted(merged.keys() & tasks.keys()):
            raise KeyError(
                "Duplicate keys detected when merging two ClusterSpecs: "
                f"{twice} of job {job!r}"
            )
        merged |= tasks
    return merged


@final
class FunctionClusterResolver(SourceResolver):
    """Asks a function of this program, which may answer otherwise later: where the
    tasks of a fleet are, say, which may move.

    Args:
        ask: Tells all tasks of the cluster.
    """

    _may_change = True

    def __init__(self, ask: Callable[[], ClusterSpec]) -> None:
        super().__init__()
        self._ask = ask

    def cluster_spec(self) -> ClusterSpec:
        return self._ask()


@runtime_checkable
class RunningCluster(Protocol):
    """Tasks that somebody has started for this program, as `zs.LocalCluster` and the
    fleets of `zs.launch` are: where they are, and how one is let in. They run for as
    long as this object is kept."""

    @property
    def resolver(self) -> ClusterResolver:
        """Tells where the tasks are now."""
        ...

    @property
    def settings(self) -> Settings:
        """Keys, and whatever else a program is told to reach them."""
        ...
