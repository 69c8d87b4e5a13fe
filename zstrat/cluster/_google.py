"""Google Cloud: its metadata server, and its instance groups.

`build_service` alone imports the client library; the metadata server answers queries of
a machine about itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from ._resolver import SourceResolver
from ._spec import ClusterSpec

if TYPE_CHECKING:
    from collections.abc import Mapping


_SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)


def build_service(
    name: str,
    version: str,
    credentials: Any = "default",
    discovery_url: str | None = None,
) -> Any:
    """Makes the client of a Google service.

    Args:
        credentials: "default": the default credentials of this machine.
        discovery_url: URL of the description of the service. None: the description that
            comes with the library.

    Raises:
        ImportError: The library is not installed.
        RuntimeError: There are no credentials on this machine.
    """
    try:
        import google.auth
        from googleapiclient import discovery
    except ImportError as error:
        raise ImportError(
            "googleapiclient is required to query clusters of Google Cloud, but is not "
            "installed: pip install 'zstrat[gce]'"
        ) from error
    if credentials == "default":
        try:
            credentials, _ = google.auth.default(scopes=_SCOPES)
        except google.auth.exceptions.DefaultCredentialsError as error:
            raise RuntimeError(
                f"no Google credentials on this machine: {error}. Run gcloud auth "
                "application-default login, or pass credentials="
            ) from error
    return discovery.build(
        name,
        version,
        credentials=credentials,
        discoveryServiceUrl=discovery_url,
        # Its cache needs oauth2client, and logs a warning without it.
        cache_discovery=False,
    )


_HOST: Final = "metadata.google.internal"
_VARIABLES: Final = ("GCE_METADATA_HOST", "GCE_METADATA_IP")
_HEADER: Final = "Metadata-Flavor"
_TIMEOUT: Final = 5.0
"""Seconds to connect and to receive the answer: the server is on the same host."""
_MAX_ANSWER_BYTES: Final = 1024 * 1024
"""The largest accepted answer; the addresses of the largest TPU pod take a tenth of
this."""


def metadata_host(env: Mapping[str, str]) -> str:
    """Returns ``host[:port]`` of the metadata server, from the same variables as
    Google's libraries."""
    return next((env[name] for name in _VARIABLES if env.get(name)), _HOST)


def ask_metadata(host: str, path: str) -> str | None:
    """Reads the entry ``path`` (such as "instance/zone"); None if it does not exist.

    Raises:
        RuntimeError: ``host`` does not answer, or is not a metadata server.
    """
    # Here, as it imports much, and only machines of Google need it. No library of HTTP
    # is needed for one request without encryption.
    import http.client

    line = http.client.HTTPConnection(host, timeout=_TIMEOUT)
    try:
        line.request("GET", f"/computeMetadata/v1/{path}", headers={_HEADER: "Google"})
        answer = line.getresponse()
        text = answer.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(
            f"Google's metadata server {host} does not answer: {error}. It exists only "
            "on machines of Google Cloud"
        ) from error
    finally:
        line.close()
    # Of all servers only this one sets the header.
    if answer.getheader(_HEADER) != "Google":
        raise RuntimeError(f"{host} is not a metadata server of Google")
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise RuntimeError(
            f"the metadata server {host} answers {path!r} with {answer.status} "
            f"{answer.reason}"
        )
    return text


@final
class GCEClusterResolver(SourceResolver):
    """Returns the running instances of a group of Compute Engine; each query asks
    again.

    All instances are tasks of one job, in the order of their internal addresses.

    Args:
        project, zone, instance_group: The group.
        port: The port of every task.
        task_type: The job of all instances.
        task_id: The index of this process.
        credentials: "default": the default credentials of this machine.
        service: The client of the "compute" service, "v1". None: it is made when it is
            first needed.
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
        """Queries the running instances.

        Raises:
            ImportError: Google's library is not installed.
            RuntimeError: This machine has no credentials, or an instance no address.
            googleapiclient.errors.HttpError: An error of Google, such as for a missing
                group.
        """
        if self._service is None:
            self._service = build_service("compute", "v1", self._credentials)
        addresses = [
            f"{self._internal_ip(name)}:{self._port}" for name in self._running()
        ]
        # Sorted, so that all tasks use the same indices.
        return ClusterSpec({self._job: sorted(addresses)})

    @property
    def task_type(self) -> str:
        """The job that all instances of the group are tasks of.

        Raises (when set):
            RuntimeError: Always: only the constructor sets the job.
        """
        return self._job

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            "You cannot reset the task_type of the GCEClusterResolver after it has "
            "been created: it is the job of all instances"
        )

    def _running(self) -> list[str]:
        """Returns the names of the running instances, from all pages of Google's
        answer."""
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
            "address; it may still be starting"
        )
