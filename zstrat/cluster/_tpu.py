"""The hosts of a TPU, from Google Cloud, Kubernetes, or the machine itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, assert_never, final

from zstrat import config

from ._google import ask_metadata, build_service, metadata_host
from ._resolver import SourceResolver
from ._spec import ClusterSpec
from ._tpu_hosts import (
    LOCAL_NAME,
    LocalTpu,
    TpuHosts,
    TpuNode,
    devices_per_host,
    find_tpu,
    hosts_of_machine,
    hosts_of_node,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_DISCOVERY: Final = "TPU_API_DISCOVERY_URL"
_NO_METADATA: Final = "TPU_SKIP_MDS_QUERY"
"""Variable that is set on machines without a metadata server; libtpu and jax read it as
well."""


@dataclass(frozen=True, slots=True)
class TPUSystemMetadata:
    """The devices of a TPU, with TensorFlow's names: a core is a device of jax."""

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: bytes | None
    """The topology that was passed to `TPUClusterResolver.set_tpu_topology` last."""
    devices: tuple[str, ...]
    """Full names of the devices, host by host."""


@final
class TPUClusterResolver(SourceResolver):
    """Returns the hosts of a TPU.

    The TPU is ``tpu`` if given. Otherwise it is taken from the environment variables
    ``KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS``, ``TPU_NAME``, ``TPU_CONFIG`` and
    ``TPU_WORKER_HOSTNAMES``, in this order. Otherwise, if this machine is a host of a
    TPU, it is that one, by the metadata server. In the last two cases ``task_id`` is
    the index of this host, otherwise 0.

    Args:
        tpu: "local": the TPU in this machine, without a cluster. With a scheme
            (``grpc://10.0.0.1:8470``, several separated by commas): its addresses.
            Otherwise: its name, for which Google Cloud's TPU service is queried.
        zone, project: Of a TPU with a name. None: those of this machine.
        job_name: The job of its hosts.
        coordinator_name, coordinator_address: An additional job with one task.
        credentials: "default": the default credentials of this machine.
        service: The client of the "tpu" service, "v1" or "v2". None: it is made when it
            is first needed.
        discovery_url: URL of the description of that service; the variable
            ``TPU_API_DISCOVERY_URL`` takes precedence.

    Raises:
        ValueError: No TPU is specified, and this machine is not a host of one; a name
            or address is invalid; only one of the coordinator's name and address is
            given.
        NotImplementedError: ``tpu`` is a list of several.
    """

    def __init__(
        self,
        tpu: str | list[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        if (coordinator_name is None) != (coordinator_address is None):
            raise ValueError(
                f"coordinator_name={coordinator_name!r} and coordinator_address="
                f"{coordinator_address!r}: expected both or none of them"
            )
        # The environment first: asking the metadata server takes seconds where there is
        # none.
        env = config.environment()
        source = find_tpu(tpu, zone, project, env)
        self._source = _this_machine(env) if source is None else source
        # For a local TPU, and for a named one before the query: task 0, and the default
        # scheme of TensorFlow.
        known = self._source if isinstance(self._source, TpuHosts) else TpuHosts(())
        super().__init__(job_name, known.own, known.scheme)
        self._job = job_name
        self._coordinator = {}
        if coordinator_name is not None and coordinator_address is not None:
            self._coordinator = {coordinator_name: [coordinator_address]}
        self._credentials, self._service, self._given_service = (
            credentials,
            service,
            service,
        )
        self._discovery_url = env.get(_DISCOVERY) or discovery_url
        self._topology: bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Closes connections to Google's service, if this object made them."""
        # A service that the program passed is the program's to close.
        if self._service is not self._given_service:
            self._service.close()
            self._service = self._given_service

    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts of the TPU, and the coordinator if there is one; an empty
        cluster for a local TPU.

        Raises:
            RuntimeError: The TPU is not ready; or this machine has no credentials for
                Google Cloud.
            ValueError: Google Cloud has no such TPU, or does not answer.
            ImportError: The library of Google Cloud is not installed.
        """
        return self._spec_of(self._hosts())

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of the task, by default of this one or of the first;
        "local" for a local TPU.

        Raises:
            ValueError: The cluster has no such task, or the TPU has no host.
            Exception: The errors of `cluster_spec`.
        """
        # Once: each call may be a query, and the answers may differ.
        hosts = self._hosts()
        if hosts is None:
            return LOCAL_NAME
        if not hosts.addresses:
            raise ValueError("No TPUs with the specified names exist.")
        job = task_type if task_type is not None else self.task_type or self._job
        index = task_id if task_id is not None else self.task_id or 0
        address = self._spec_of(hosts).task_address(job, index)
        return self._with_layer(address, rpc_layer)

    def get_master(self) -> str:
        """Returns the result of `master` without arguments."""
        return self.master()

    def get_job_name(self) -> str:
        """Returns the job of the hosts of the TPU."""
        return self._job

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Sets the topology of this TPU, which `get_tpu_system_metadata` returns."""
        self._topology = bytes(serialized_tpu_topology)

    def _accelerators(self) -> Mapping[str, int]:
        """Returns ``{"TPU": devices per host}``; empty if only addresses are known.

        Raises:
            RuntimeError: The hosts have different numbers of devices.
            Exception: The errors of `cluster_spec`.
        """
        hosts = self._hosts()
        if hosts is None:
            return {"TPU": count_local_devices()}
        if hosts.accelerator is None:
            return {}
        devices = devices_per_host(hosts.accelerator, len(hosts.addresses))
        return {} if devices is None else {"TPU": devices}

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns the devices of the TPU.

        Raises:
            RuntimeError: There are no devices, or their number is unknown.
            Exception: The errors of `num_accelerators`.
        """
        per_host = self.num_accelerators().get("TPU", 0)
        if not per_host:
            raise RuntimeError(
                "Cannot find any TPU cores in the system (master address "
                f"{self.master()}): this machine has none, or only the address of the "
                "TPU is known. Pass the name of the TPU"
            )
        hosts = self._hosts()
        num_hosts = 1 if hosts is None else len(hosts.addresses)
        job = "localhost" if hosts is None else self._job
        return TPUSystemMetadata(
            num_cores=num_hosts * per_host,
            num_hosts=num_hosts,
            num_of_cores_per_host=per_host,
            topology=self._topology,
            devices=tuple(
                f"/job:{job}/replica:0/task:{host}/device:TPU:{device}"
                for host in range(num_hosts)
                for device in range(per_host)
            ),
        )

    def _spec_of(self, hosts: TpuHosts | None) -> ClusterSpec:
        if hosts is None:
            return ClusterSpec({})
        return ClusterSpec({self._job: list(hosts.addresses), **self._coordinator})

    def _hosts(self) -> TpuHosts | None:
        """Returns the current hosts of the TPU, None for a local TPU."""
        match self._source:
            case LocalTpu():
                return None
            case TpuHosts():
                return self._source
            case TpuNode():
                return hosts_of_node(self._source.name, self._query_node(self._source))
            case _:
                assert_never(self._source)

    def _query_node(self, node: TpuNode) -> Mapping[str, Any]:
        if self._service is None:
            self._service = build_service(
                "tpu", "v2", self._credentials, self._discovery_url
            )
        try:
            host = metadata_host(config.environment())
            project = node.project or ask_metadata(host, "project/project-id")
            # The server's answer is a path, projects/NUMBER/zones/ZONE.
            zone = node.zone or ask_metadata(host, "instance/zone") or ""
            parent = f"projects/{project}/locations/{zone.split('/')[-1]}"
            nodes = self._service.projects().locations().nodes()
            query = nodes.get(name=f"{parent}/nodes/{node.name}")
            answer: Mapping[str, Any] = query.execute()  # untyped
            return answer
        except Exception as error:  # becomes the cause of TensorFlow's error
            raise ValueError(
                f"Could not lookup TPU metadata from name {node.name!r}. Please "
                "doublecheck the tpu argument in the TPUClusterResolver constructor, "
                f"its project and zone. Exception: {error}"
            ) from error


def _this_machine(env: Mapping[str, str]) -> TpuHosts:
    """Returns the TPU of which this machine is a host.

    Raises:
        ValueError: This machine is not a host of a TPU.
    """
    words = (
        "Please provide a TPU Name to connect to: tpu, or TPU_NAME in the environment; "
        '"local" is the TPU in this machine'
    )
    if env.get(_NO_METADATA):
        raise ValueError(words)
    # The attributes that Google sets on hosts of a TPU only.
    host, path = metadata_host(env), "instance/attributes"
    try:
        workers = ask_metadata(host, f"{path}/worker-network-endpoints")
        own = ask_metadata(host, f"{path}/agent-worker-number")
        accelerator = ask_metadata(host, f"{path}/accelerator-type")
    except RuntimeError as error:
        raise ValueError(f"{words}. This machine is not a TPU host: {error}") from error
    if not workers:
        raise ValueError(f"{words}. This machine is not a TPU host")
    sources = f"{host}: worker-network-endpoints", f"{host}: agent-worker-number"
    return hosts_of_machine(workers, own, accelerator, sources)


_BUS: Final = Path("/sys/bus/pci/devices")
_GOOGLE: Final = "0x1ae0"
_DEVICES_OF_A_CHIP: Final = {
    "0x0027": 2,  # v2, v3
    "0x005e": 1,  # v4
    "0x0062": 1,  # v5p
    "0x0063": 1,  # v5e
    "0x006f": 1,  # v6e
    "0x0076": 2,  # 7x
}
"""PCI device id of a TPU chip -> number of devices. Google has other PCI devices as
well, such as network cards."""


def count_local_devices() -> int:
    """Counts the TPU devices in this machine; 0 without a PCI bus."""
    return sum(
        _DEVICES_OF_A_CHIP.get(_read(path / "device"), 0)
        for path in _BUS.glob("*")
        if _read(path / "vendor") == _GOOGLE
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
