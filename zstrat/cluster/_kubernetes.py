"""Resolves tasks as the pods of a Kubernetes cluster with certain labels.

Law of the file: only this module imports the client library, at the first query.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, final

from zstrat import config

from ._resolver import SourceResolver
from ._slurm import natural_order
from ._spec import ClusterSpec, host_and_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DEFAULT: Final = {"worker": ("job-name=tensorflow",)}
_TIMEOUT: Final = 30.0
"""Seconds for one answer, which lists pods."""
_NAMES: Final = ("POD_NAME", "HOSTNAME")
"""Variables with the name of this pod: an optional one, then that of Kubernetes."""
_SERVICE: Final = "KUBERNETES_SERVICE_HOST"
"""A variable that Kubernetes sets in every container."""


class ExecutableLocation(enum.Enum):
    """The location of this program, which determines its credentials."""

    WITHIN_CLUSTER = 0
    """This program runs in a pod, and has the credentials of the pod's service
    account."""
    OFF_CLUSTER = 1
    """This program runs elsewhere, and has the credentials in ``kubectl``'s
    configuration."""


KubernetesExecutableLocation = ExecutableLocation
"""The name in newer versions of TensorFlow."""


@final
class KubernetesClusterResolver(SourceResolver):
    """Queries Kubernetes for the pods with given labels, in all namespaces.

    The address of a task is that of its pod; with ``address="host"`` that of the host,
    as in TensorFlow, which requires a ``hostPort``. Tasks are in the order of the
    selectors, then of their pods' names, worker-2 before worker-10. In a pod, this
    process is the task of the pod with its name (POD_NAME, else HOSTNAME); if there is
    none, set ``task_type`` and ``task_id``.

    Args:
        job_to_label_mapping: Job -> label selectors, each as ``kubectl -l`` takes it.
            None: ``{"worker": ["job-name=tensorflow"]}``.
        tf_server_port: Port of every task.
        override_client: A `kubernetes.client.CoreV1Api` of your own; no configuration
            is loaded then. None: a client for ``executable_location``.
        executable_location: None: within the cluster where Kubernetes has set its
            variables, else off the cluster.
        address: "pod" or "host".

    Raises:
        ValueError: ``address`` is neither.
    """

    _may_change = True

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: ExecutableLocation | None = None,
        *,
        address: str = "pod",
    ) -> None:
        super().__init__(rpc_layer=rpc_layer)
        if address not in ("pod", "host"):
            raise ValueError(f"address={address!r}: expected 'pod' or 'host'")
        self._address = f"{address}_ip"
        self._selectors = dict(job_to_label_mapping or _DEFAULT)
        self._port, self._client = tf_server_port, override_client
        if executable_location is None:
            within = _SERVICE in config.environment()
            executable_location = ExecutableLocation(0 if within else 1)
        self._location = ExecutableLocation(executable_location)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the pods that exist now.

        Raises:
            RuntimeError: A pod is not running, or Kubernetes does not answer, or does
                not let this program ask.
            ImportError: The client library is not installed.
        """
        return ClusterSpec(
            {
                job: [self._address_of(pod) for pod in pods]
                for job, pods in self._pods().items()
            }
        )

    def _pods(self) -> dict[str, list[Any]]:
        # Only now: a program that names its tasks by itself needs no client library.
        if self._client is None:
            self._client = _Client(self._location)
        ask = self._client.list_pod_for_all_namespaces
        # Kubernetes promises no order, and all tasks have to number each other alike.
        return {
            job: [
                pod
                for each in selectors
                for pod in sorted(
                    ask(label_selector=each).items,
                    key=lambda pod: natural_order(pod.metadata.name),
                )
            ]
            for job, selectors in self._selectors.items()
        }

    def _address_of(self, pod: Any) -> str:
        # Its address may be missing, or belong to a pod that ends. Leaving it out would
        # give the pods after it other indices.
        if pod.status.phase != "Running":
            raise RuntimeError(
                f'Pod "{pod.metadata.name}" is not running; phase: '
                f'"{pod.status.phase}". Ask again when it runs, or narrow the labels'
            )
        return host_and_port(str(getattr(pod.status, self._address)), self._port)

    def _found_task_type(self) -> str | None:
        return self._own_task()[0]

    def _found_task_id(self) -> int | None:
        return self._own_task()[1]

    def _own_task(self) -> tuple[str | None, int | None]:
        """Returns the job and index of the pod in which this process runs; None, None
        if it runs in no pod of the cluster."""
        env = config.environment()
        own_name = next((env[name] for name in _NAMES if env.get(name)), None)
        # Off the cluster HOSTNAME is that of some machine, which a pod may have as
        # well.
        if own_name is None or self._location is ExecutableLocation.OFF_CLUSTER:
            return None, None
        for job, pods in self._pods().items():
            for index, pod in enumerate(pods):
                if pod.metadata.name == own_name:
                    return job, index
        return None, None


@final
class _Client:
    """Queries Kubernetes for pods with a deadline; its errors say what to do."""

    def __init__(self, location: ExecutableLocation) -> None:
        try:
            from kubernetes import client
            from kubernetes import config as places
        except ImportError as error:
            raise ImportError(
                "The Kubernetes Python client must be installed before using the "
                "KubernetesClusterResolver: pip install 'zstrat[kubernetes]'"
            ) from error
        # Not the library's global default, which is the program's.
        self._settings = client.Configuration()
        try:
            if location is ExecutableLocation.WITHIN_CLUSTER:
                places.load_incluster_config(client_configuration=self._settings)
            else:
                places.load_kube_config(client_configuration=self._settings)
        except places.ConfigException as error:
            raise RuntimeError(
                f"Kubernetes cannot be reached from here ({location.name}): {error}. "
                "Give executable_location, or override_client"
            ) from error

    def list_pod_for_all_namespaces(self, label_selector: str) -> Any:
        from kubernetes import client
        from urllib3.exceptions import HTTPError

        try:
            # Closed after each query: its pool of threads and connections would stay
            # for the life of the program, which asks now and then.
            with client.ApiClient(self._settings) as api:
                return client.CoreV1Api(api).list_pod_for_all_namespaces(
                    label_selector=label_selector, _request_timeout=_TIMEOUT
                )
        except client.ApiException as error:
            raise RuntimeError(
                f"Kubernetes refused to list the pods {label_selector!r}: "
                f"{error.status} {error.reason}. The account needs the right to list "
                "pods in all namespaces (a ClusterRole)"
            ) from error
        except HTTPError as error:
            raise RuntimeError(
                f"Kubernetes at {self._settings.host} did not answer: {error}"
            ) from error
