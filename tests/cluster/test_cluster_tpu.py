"""Which TPU is meant, and its hosts as the TPU service and the metadata server say."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from zstrat.cluster import TPUClusterResolver
from zstrat.cluster._tpu import local_devices
from zstrat.cluster._tpu_place import devices_per_host

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Web

VARIABLES = (
    "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS",
    "TPU_NAME",
    "TPU_CONFIG",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
    "TPU_ACCELERATOR_TYPE",
    "TPU_API_DISCOVERY_URL",
    "GCE_METADATA_HOST",
)
ATTRIBUTES = "/computeMetadata/v1/instance/attributes"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is no TPU's, and has no metadata server."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")


@pytest.fixture
def metadata(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """A machine with a metadata server, which marks its answers as Google's."""
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    monkeypatch.setenv("GCE_METADATA_HOST", web.host)
    for entry in (
        "worker-network-endpoints",
        "agent-worker-number",
        "accelerator-type",
    ):
        tell(web, f"{ATTRIBUTES}/{entry}", "<!DOCTYPE html><title>404</title>", 404)
    return web


def tell(web: Web, path: str, body: str, status: int = 200) -> None:
    web.put(
        path, body, status, Metadata_Flavor="Google", Content_Type="application/text"
    )


def node(**others: Any) -> dict[str, Any]:
    """An answer to projects.locations.nodes.get of the TPU service, v2 (shortened)."""
    return {
        "name": "projects/my-project/locations/us-central2-b/nodes/my-tpu",
        "acceleratorType": "v4-16",
        "state": "READY",
        "runtimeVersion": "tpu-ubuntu2204-base",
        "networkConfig": {"network": "projects/my-project/global/networks/default"},
        "networkEndpoints": [
            {"ipAddress": "10.130.0.9", "port": 8470, "accessConfig": {}},
            {"ipAddress": "10.130.0.10", "port": 8470, "accessConfig": {}},
        ],
        "health": "HEALTHY",
        "createTime": "2024-05-02T09:14:27Z",
        "acceleratorConfig": {"type": "V4", "topology": "2x2x2"},
        "id": "2233445566",
    } | others


class Service:
    """The "tpu" service, with its methods' true names and arguments."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers, self.names = list(answers), list[str]()

    def projects(self) -> Service:
        return self

    locations = nodes = projects

    def get(self, *, name: str) -> Service:
        self.names.append(name)
        return self

    def execute(self) -> dict[str, Any]:
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def named(service: Service, **options: Any) -> TPUClusterResolver:
    return TPUClusterResolver(
        "my-tpu", "us-central2-b", "my-project", service=service, **options
    )


# ---- local -------------------------------------------------------------------------


@pytest.mark.shows("tf.distribute.cluster_resolver.TPUClusterResolver")
def test_the_tpu_in_this_machine() -> None:
    resolver = TPUClusterResolver("local")
    assert not resolver.cluster_spec()
    assert resolver.master() == resolver.get_master() == "local"
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.get_job_name() == "worker"
    assert resolver.environment == ""
    assert set(resolver.num_accelerators()) == {"TPU"}


@pytest.mark.shows("TPUClusterResolver(tpu='')")
def test_local_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "local")
    assert TPUClusterResolver(tpu="").master() == "local"


@pytest.mark.parametrize(("chip", "devices"), [("0x0027", 8), ("0x0063", 4)])
def test_devices_in_this_machine(tmp_path: Path, chip: str, devices: int) -> None:
    """As Linux shows the bus: four chips, a card of Google, and somebody else's."""
    cards = [("0x1ae0", chip)] * 4 + [("0x1ae0", "0x0042"), ("0x8086", chip)]
    for number, (vendor, device) in enumerate(cards):
        card = tmp_path / f"0000:00:{number:02x}.0"
        card.mkdir()
        (card / "vendor").write_text(f"{vendor}\n")
        (card / "device").write_text(f"{device}\n")
    (tmp_path / "0000:00:ff.0").mkdir()
    assert local_devices(tmp_path) == devices
    assert local_devices(tmp_path / "nothing") == 0


def test_no_tpu_in_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zstrat.cluster._tpu.local_devices", lambda: 0)
    resolver = TPUClusterResolver("local")
    assert resolver.num_accelerators() == {"TPU": 0}
    words = r"^Cannot find any TPU cores in the system \(master address local\)"
    with pytest.raises(RuntimeError, match=words):
        resolver.get_tpu_system_metadata()


def test_metadata_of_a_local_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zstrat.cluster._tpu.local_devices", lambda: 2)
    resolver = TPUClusterResolver("local")
    resolver.set_tpu_topology(b"\x0a\x01")
    found = resolver.get_tpu_system_metadata()
    assert (found.num_cores, found.num_hosts, found.num_of_cores_per_host) == (2, 1, 2)
    assert found.topology == b"\x0a\x01"
    assert found.devices == (
        "/job:localhost/replica:0/task:0/device:TPU:0",
        "/job:localhost/replica:0/task:0/device:TPU:1",
    )


# ---- addresses ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tpu", "addresses", "master"),
    [
        ("grpc://10.1.2.3:8470", ["10.1.2.3:8470"], "grpc://10.1.2.3:8470"),
        (["grpc://10.1.2.3"], ["10.1.2.3:8470"], "grpc://10.1.2.3:8470"),
        ("grpc://a:1,grpc://b:2, c", ["a:1", "b:2", "c:8470"], "grpc://a:1"),
        ("tcp://[::1]:5", ["[::1]:5"], "tcp://[::1]:5"),
    ],
)
def test_addresses(tpu: Any, addresses: list[str], master: str) -> None:
    resolver = TPUClusterResolver(tpu)
    assert resolver.cluster_spec().job_tasks("worker") == addresses
    assert resolver.master() == resolver.get_master() == master
    assert resolver.num_accelerators() == {}
    with pytest.raises(RuntimeError, match="Cannot find any TPU cores"):
        resolver.get_tpu_system_metadata()


def test_jobs_and_coordinator() -> None:
    resolver = TPUClusterResolver(
        "grpc://a:1,grpc://b:2",
        job_name="tpu_worker",
        coordinator_name="coordinator",
        coordinator_address="10.128.1.5:10203",
    )
    assert resolver.cluster_spec().as_dict() == {
        "tpu_worker": ["a:1", "b:2"],
        "coordinator": ["10.128.1.5:10203"],
    }
    assert resolver.get_job_name() == resolver.task_type == "tpu_worker"
    assert resolver.master("coordinator", 0) == "grpc://10.128.1.5:10203"
    assert resolver.master(task_id=1, rpc_layer="tcp") == "tcp://b:2"
    resolver.task_id = 1
    assert resolver.master() == "grpc://b:2"
    with pytest.raises(ValueError, match="No task with index 2 in job 'tpu_worker'"):
        resolver.master(task_id=2)


@pytest.mark.parametrize(
    "half", [{"coordinator_name": "c"}, {"coordinator_address": "a:1"}]
)
def test_half_a_coordinator(half: Any) -> None:
    with pytest.raises(ValueError, match="go together: a resolver starts no server"):
        TPUClusterResolver("local", **half)


def test_lists() -> None:
    with pytest.raises(ValueError, match="At least one TPU must be specified"):
        TPUClusterResolver([])
    with pytest.raises(NotImplementedError, match="Using multiple TPUs in a single"):
        TPUClusterResolver(["a", "b"])


@pytest.mark.parametrize(
    "address", ["grpc://a:1,,grpc://b:1", "grpc://", "grpc://a:84x0", "grpc://a:"]
)
def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    words = "expected addresses of TPU hosts, as grpc://"
    with pytest.raises(ValueError, match=f"^tpu: {words}"):
        TPUClusterResolver(address)
    for name in ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"):
        monkeypatch.setenv(name, address)
        with pytest.raises(ValueError, match=f"^{name}: {words}"):
            TPUClusterResolver()


def test_an_address_of_many_colons_is_one_of_ipv6() -> None:
    resolver = TPUClusterResolver("grpc://[::1]:8470,grpc://[::2]")
    assert resolver.cluster_spec().as_dict() == {"worker": ["[::1]:8470", "[::2]:8470"]}


@pytest.mark.parametrize("hosts", ["a,", "a:b", "a:0:"])
def test_hosts_of_the_environment_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
    with pytest.raises(ValueError, match=r"^TPU_WORKER_HOSTNAMES: expected the hosts"):
        TPUClusterResolver()


@pytest.mark.parametrize("number", ["x", "2", "-1", "9" * 5000])
def test_a_number_of_the_environment_that_is_none(
    monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", number)
    with pytest.raises(ValueError, match=r"^TPU_WORKER_ID: expected the number of"):
        TPUClusterResolver()


# ---- the environment ---------------------------------------------------------------


@pytest.mark.parametrize("tpu", [None, ""])
def test_the_environment_in_its_order(
    monkeypatch: pytest.MonkeyPatch, tpu: Any
) -> None:
    def master() -> str:
        return TPUClusterResolver(tpu).master()

    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "host-0,host-1")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    resolver = TPUClusterResolver(tpu)
    assert resolver.master() == "grpc://host-1:8470"
    assert resolver.task_id == 1
    assert resolver.num_accelerators() == {"TPU": 4}
    monkeypatch.setenv("TPU_CONFIG", '{"tpu_node_name": "grpc://config:1"}')
    assert master() == "grpc://config:1"
    monkeypatch.setenv("TPU_NAME", "grpc://name:1")
    assert master() == "grpc://name:1"
    monkeypatch.setenv("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "grpc://k0:1,grpc://k1:1")
    assert master() == "grpc://k0:1"
    assert TPUClusterResolver("grpc://said:1").master() == "grpc://said:1"


def test_a_node_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        '{"tpu_node_name": "my-tpu", "project": "my-project", "zone": "us-central2-b"}'
    )
    monkeypatch.setenv("TPU_CONFIG", text)
    service = Service(node())
    TPUClusterResolver(service=service).cluster_spec()
    TPUClusterResolver(zone="z", service=service).cluster_spec()
    assert service.names == [
        "projects/my-project/locations/us-central2-b/nodes/my-tpu",
        "projects/my-project/locations/z/nodes/my-tpu",
    ]


@pytest.mark.parametrize(
    "text",
    ["x", "[]", '{"tpu_node_name": 5}', '{"tpu_node_name": "a", "zone": []}'],
)
def test_a_configuration_that_is_none(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TPU_CONFIG", text)
    with pytest.raises(ValueError, match=r"^TPU_CONFIG: expected a JSON object with"):
        TPUClusterResolver()


def test_nobody_says_which_tpu() -> None:
    with pytest.raises(ValueError, match=r"^Please provide a TPU Name to connect to"):
        TPUClusterResolver()


# ---- a host of a TPU, by its metadata server ---------------------------------------


@pytest.mark.parametrize(
    "workers",
    [
        "10.164.0.3,10.164.0.4",
        "unknown:unknown:10.164.0.3,unknown:unknown:10.164.0.4",
    ],
)
def test_a_host_of_a_tpu(metadata: Web, workers: str) -> None:
    tell(metadata, f"{ATTRIBUTES}/worker-network-endpoints", workers)
    tell(metadata, f"{ATTRIBUTES}/agent-worker-number", "1")
    tell(metadata, f"{ATTRIBUTES}/accelerator-type", "v4-16")
    resolver = TPUClusterResolver(tpu="")
    assert resolver.cluster_spec().job_tasks("worker") == [
        "10.164.0.3:8470",
        "10.164.0.4:8470",
    ]
    assert resolver.task_id == 1
    assert resolver.master() == "grpc://10.164.0.4:8470"
    assert resolver.num_accelerators() == {"TPU": 4}
    assert all(headers["metadata-flavor"] == "Google" for *_, headers in metadata.asked)


def test_a_machine_of_google_without_a_tpu(metadata: Web) -> None:
    words = r"^Please provide a TPU Name .* This machine is no host of one$"
    with pytest.raises(ValueError, match=words):
        TPUClusterResolver()


def test_workers_that_cannot_be_read(metadata: Web) -> None:
    tell(metadata, f"{ATTRIBUTES}/worker-network-endpoints", "a:b")
    with pytest.raises(ValueError, match="expected the hosts of a TPU, as names or as"):
        TPUClusterResolver()
    tell(metadata, f"{ATTRIBUTES}/worker-network-endpoints", "a,b")
    tell(metadata, f"{ATTRIBUTES}/agent-worker-number", "2")
    with pytest.raises(ValueError, match="the number of this host of 2, got '2'"):
        TPUClusterResolver()


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (200, {}, "answers, and is no metadata server of Google"),
        (503, {"Metadata_Flavor": "Google"}, "with 503 Service Unavailable"),
    ],
)
def test_another_server(metadata: Web, status: int, headers: Any, words: str) -> None:
    path = f"{ATTRIBUTES}/worker-network-endpoints"
    metadata.put(path, "10.0.0.1", status, **headers)
    with pytest.raises(ValueError, match=f"^Please provide a TPU Name .*{words}"):
        TPUClusterResolver()


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    words = "metadata server 127.0.0.1:1 does not answer"
    with pytest.raises(ValueError, match=f"^Please provide a TPU Name .*{words}"):
        TPUClusterResolver()


# ---- a TPU with a name, by the service ---------------------------------------------


def test_a_tpu_with_a_name() -> None:
    service = Service(node())
    resolver = named(service)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.130.0.9:8470", "10.130.0.10:8470"]
    }
    assert resolver.master() == "grpc://10.130.0.9:8470"
    assert resolver.num_accelerators() == {"TPU": 4}
    found = resolver.get_tpu_system_metadata()
    assert (found.num_cores, found.num_hosts, found.num_of_cores_per_host) == (8, 2, 4)
    assert found.topology is None
    assert len(found.devices) == 8
    assert found.devices[4] == "/job:worker/replica:0/task:1/device:TPU:0"
    assert set(service.names) == {
        "projects/my-project/locations/us-central2-b/nodes/my-tpu"
    }


def test_project_and_zone_of_this_machine(metadata: Web) -> None:
    tell(metadata, "/computeMetadata/v1/project/project-id", "here")
    tell(
        metadata, "/computeMetadata/v1/instance/zone", "projects/12345/zones/eu-west4-a"
    )
    service = Service(node())
    TPUClusterResolver("my-tpu", service=service).cluster_spec()
    assert service.names == ["projects/here/locations/eu-west4-a/nodes/my-tpu"]


def test_an_older_answer_has_one_host() -> None:
    answer = node(ipAddress="10.240.1.2", port="8479", acceleratorType="v3-8")
    del answer["networkEndpoints"]
    resolver = named(Service(answer))
    assert resolver.master() == "grpc://10.240.1.2:8479"
    assert resolver.num_accelerators() == {"TPU": 8}


def test_a_tpu_that_is_not_ready() -> None:
    resolver = named(Service(node(state="CREATING"), node()))
    words = '^TPU "my-tpu" is not yet ready; state: "CREATING"$'
    with pytest.raises(RuntimeError, match=words):
        resolver.cluster_spec()
    assert resolver.cluster_spec().num_tasks("worker") == 2


def test_a_tpu_that_there_is_not() -> None:
    missing = KeyError("no such node")
    with pytest.raises(
        ValueError, match=r"^Could not lookup TPU metadata from name 'my-tpu'.*no such"
    ) as raised:
        named(Service(missing)).cluster_spec()
    assert raised.value.__cause__ is missing


def test_a_tpu_that_names_no_hosts() -> None:
    resolver = named(Service(node(networkEndpoints=[])))
    with pytest.raises(ValueError, match=r"^No TPUs with the specified names exist\.$"):
        resolver.master()


def test_a_tpu_without_ports() -> None:
    answer = node(networkEndpoints=[{"ipAddress": "10.0.0.1"}])
    assert named(Service(answer)).master() == "grpc://10.0.0.1:8470"


def test_hosts_with_different_numbers_of_devices() -> None:
    resolver = named(Service(node(acceleratorType="v3-9")))
    with pytest.raises(
        RuntimeError, match=r"^TPU cores on each device is not the same"
    ):
        resolver.num_accelerators()


@pytest.mark.parametrize(
    ("accelerator", "hosts", "devices"),
    [
        ("v2-8", 1, 8),
        ("v3-32", 4, 8),
        ("v4-8", 1, 4),
        ("v4-32", 4, 4),
        ("v5p-16", 2, 4),
        ("v5litepod-1", 1, 1),
        ("v5litepod-16", 4, 4),
        ("v6e-8", 1, 8),
        ("v99-8", 1, None),
        ("nonsense", 1, None),
    ],
)
def test_devices_of_a_host(accelerator: str, hosts: int, devices: int | None) -> None:
    """By Google's tables of accelerators: cores of v2 and v3, chips of the others."""
    assert devices_per_host(accelerator, hosts) == devices


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    resolver = TPUClusterResolver("my-tpu", "z", "p")
    with pytest.raises(ImportError, match=r"pip install 'zstrat\[gce\]'"):
        resolver.cluster_spec()


def test_the_true_request() -> None:
    """By the description of the service that Google's library brings."""
    discovery = pytest.importorskip("googleapiclient.discovery")
    from googleapiclient.http import HttpMockSequence

    http = HttpMockSequence([({"status": "200"}, json.dumps(node()))])
    service = discovery.build("tpu", "v2", http=http, static_discovery=True)
    assert named(service).cluster_spec().num_tasks("worker") == 2
    [(uri, method, *_)] = http.request_sequence
    assert method == "GET"
    assert uri.startswith(
        "https://tpu.googleapis.com/v2/projects/my-project/locations/us-central2-b/"
        "nodes/my-tpu?"
    )


def test_its_own_connections_are_closed() -> None:
    pytest.importorskip("googleapiclient")
    from google.auth.credentials import AnonymousCredentials

    lent = Service(node())
    with named(lent) as resolver:
        assert resolver.cluster_spec().num_tasks("worker") == 2
    assert resolver.cluster_spec().num_tasks("worker") == 2
    url = "http://127.0.0.1:1/$discovery"
    with TPUClusterResolver(
        "my-tpu", "z", "p", credentials=AnonymousCredentials(), discovery_url=url
    ) as resolver:
        with pytest.raises(OSError, match="refused"):
            resolver.cluster_spec()
