"""The hosts of a TPU, as the TPU service and the metadata server say."""

import json
import sys

import pytest
from tpu_service import ATTRIBUTES, Service, named, node, tell

from zstrat.cluster import TPUClusterResolver

pytestmark = pytest.mark.usefixtures("nowhere")


@pytest.mark.parametrize(
    "workers",
    [
        "10.164.0.3,10.164.0.4",
        "unknown:unknown:10.164.0.3,unknown:unknown:10.164.0.4",
    ],
)
def test_a_host_of_a_tpu(metadata, workers):
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


def test_a_machine_of_google_without_a_tpu(metadata):
    words = "TPU"
    with pytest.raises(ValueError, match=words):
        TPUClusterResolver()


def test_workers_that_cannot_be_read(metadata):
    tell(metadata, f"{ATTRIBUTES}/worker-network-endpoints", "a:b")
    with pytest.raises(ValueError, match="TPU"):
        TPUClusterResolver()
    tell(metadata, f"{ATTRIBUTES}/worker-network-endpoints", "a,b")
    tell(metadata, f"{ATTRIBUTES}/agent-worker-number", "2")
    with pytest.raises(ValueError, match=r"\b2\b.*'2'"):
        TPUClusterResolver()


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (200, {}, "is not a metadata server of Google"),
        (503, {"Metadata_Flavor": "Google"}, "with 503 Service Unavailable"),
    ],
)
def test_another_server(metadata, status, headers, words):
    path = f"{ATTRIBUTES}/worker-network-endpoints"
    metadata.put(path, "10.0.0.1", status, **headers)
    with pytest.raises(ValueError, match=f"^Please provide a TPU Name .*{words}"):
        TPUClusterResolver()


def test_no_server_at_all(monkeypatch):
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    words = "metadata server 127.0.0.1:1 does not answer"
    with pytest.raises(ValueError, match=f"^Please provide a TPU Name .*{words}"):
        TPUClusterResolver()


def test_a_tpu_with_a_name():
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


def test_project_and_zone_of_this_machine(metadata):
    tell(metadata, "/computeMetadata/v1/project/project-id", "here")
    tell(
        metadata, "/computeMetadata/v1/instance/zone", "projects/12345/zones/eu-west4-a"
    )
    service = Service(node())
    TPUClusterResolver("my-tpu", service=service).cluster_spec()
    assert service.names == ["projects/here/locations/eu-west4-a/nodes/my-tpu"]


def test_an_older_answer_has_one_host():
    answer = node(ipAddress="10.240.1.2", port="8479", acceleratorType="v3-8")
    del answer["networkEndpoints"]
    resolver = named(Service(answer))
    assert resolver.master() == "grpc://10.240.1.2:8479"
    assert resolver.num_accelerators() == {"TPU": 8}


def test_a_tpu_that_is_not_ready():
    resolver = named(Service(node(state="CREATING"), node()))
    words = r'TPU.*"my-tpu".*"CREATING"'
    with pytest.raises(RuntimeError, match=words):
        resolver.cluster_spec()
    assert resolver.cluster_spec().num_tasks("worker") == 2


def test_a_tpu_that_there_is_not():
    missing = KeyError("no such node")
    with pytest.raises(ValueError, match=r"TPU.*'my-tpu'") as raised:
        named(Service(missing)).cluster_spec()
    assert raised.value.__cause__ is missing


def test_a_tpu_that_names_no_hosts():
    resolver = named(Service(node(networkEndpoints=[])))
    with pytest.raises(ValueError, match="TPUs"):
        resolver.master()


def test_a_tpu_without_ports():
    answer = node(networkEndpoints=[{"ipAddress": "10.0.0.1"}])
    assert named(Service(answer)).master() == "grpc://10.0.0.1:8470"


def test_hosts_with_different_numbers_of_devices():
    resolver = named(Service(node(acceleratorType="v3-9")))
    with pytest.raises(RuntimeError, match="TPU"):
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
def test_devices_of_a_host(monkeypatch, accelerator, hosts, devices):
    """By Google's tables of accelerators: cores of v2 and v3, chips of the others."""
    names = ",".join(f"host-{number}" for number in range(hosts))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", names)
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator)
    known = {} if devices is None else {"TPU": devices}
    assert TPUClusterResolver().num_accelerators() == known


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    resolver = TPUClusterResolver("my-tpu", "z", "p")
    with pytest.raises(ImportError, match=r"'zstrat\[gce\]'"):
        resolver.cluster_spec()


def test_the_true_request():
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


def test_its_own_connections_are_closed():
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
