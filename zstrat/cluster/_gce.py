"""The running machines of an instance group of Google Compute Engine."""

from __future__ import annotations

from typing import Any, final

from ._google import build_service
from ._resolver import SourceResolver
from ._spec import ClusterSpec


@final
class GCEClusterResolver(SourceResolver):
    """Asks Compute Engine for the running instances of a group, at each question.

    All are tasks of one job, in the order of their addresses, which are internal ones.

    Args:
        project, zone, instance_group: Which group.
        port: Of every task.
        task_type: The job that all instances are tasks of.
        task_id: Which of them this process is.
        credentials: "default": those that Google's library finds on this machine.
        service: The client of the "compute" service, "v1". None: one is made when it
            is first needed.
    """

    _may_change = True

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        super().__init__(task_id=task_id, rpc_layer=rpc_layer)
        self._project, self._zone, self._group = project, zone, instance_group
        self._port, self._job = port, task_type
        self._credentials, self._service = credentials, service

    def cluster_spec(self) -> ClusterSpec:
        """The instances that run now.

        Raises:
            ImportError: Google's library is not installed.
            RuntimeError: This machine has no credentials, or an instance no address.
            googleapiclient.errors.HttpError: Google's refusal, such as for a group that
                is not there.
        """
        if self._service is None:
            self._service = build_service("compute", "v1", self._credentials)
        addresses = [
            f"{self._internal_ip(name)}:{self._port}" for name in self._running()
        ]
        # Sorted, as all tasks have to number each other alike.
        return ClusterSpec({self._job: sorted(addresses)})

    @property
    def task_type(self) -> str:
        """The job that all instances of the group are tasks of.

        Raises (when set):
            RuntimeError: Always: it is said when the resolver is made.
        """
        return self._job

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            "You cannot reset the task_type of the GCEClusterResolver after it has "
            "been created: it is the job of all instances"
        )

    def _running(self) -> list[str]:
        """Names of the instances, from all pages of the answer."""
        groups, names = self._service.instanceGroups(), []
        request = groups.listInstances(
            project=self._project,
            zone=self._zone,
            instanceGroup=self._group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        while request is not None:
            answer = request.execute()
            # An instance is named by an URL; a group without any has no "items".
            names += [
                item["instance"].rpartition("/")[2] for item in answer.get("items", ())
            ]
            request = groups.listInstances_next(
                previous_request=request, previous_response=answer
            )
        return names

    def _internal_ip(self, instance: str) -> str:
        found = (
            self._service.instances()
            .get(project=self._project, zone=self._zone, instance=instance)
            .execute()
        )
        for interface in found.get("networkInterfaces", ()):
            if "networkIP" in interface:
                return str(interface["networkIP"])
        raise RuntimeError(
            f"the instance {instance!r} of the group {self._group!r} has no internal "
            "address: is it being started?"
        )
