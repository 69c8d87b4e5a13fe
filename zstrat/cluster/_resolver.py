"""Where a process learns who is in its cluster, and who it is itself.

A resolver answers four questions: which tasks there are, which one this process is, the
address of a task, and its accelerators. It is asked again whenever the answer may have
changed, so it must be cheap: the environment, a file, or one question to the service
that knows, with a deadline. It never connects to the tasks themselves.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, final

from ._spec import ClusterSpec

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    def environment(self) -> str:
        """Where this process runs ("google", ...), "" for nowhere special."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job that this process is a task of ("worker", "ps", ...); None if it is
        not known. May be set."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job, from 0; None if it is not known. May
        be set."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def with_scheme(address: str, rpc_layer: str | None) -> str:
    """The address behind ``rpc_layer://``, or as it is without one."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


@final
class SimpleClusterResolver(ClusterResolver):
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
        self._spec, self._master, self._environment = cluster_spec, master, environment
        self._accelerators = dict(num_accelerators or {})
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer

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
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._spec.task_address(task_type, task_id)
        return with_scheme(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        return dict(self._accelerators)

    @property
    def environment(self) -> str:
        return self._environment
