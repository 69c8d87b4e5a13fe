"""Several resolvers as one: say, workers from a scheduler and ps from a file."""

from __future__ import annotations

from typing import final

from ._resolver import ClusterResolver, SourceResolver, with_scheme
from ._spec import ClusterSpec


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
