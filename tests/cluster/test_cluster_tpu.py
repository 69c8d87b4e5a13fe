"""Which TPU is meant, and its hosts as the TPU service and the metadata server say."""

import pytest
from tpu_service import Service, node

from zstrat.cluster import TPUClusterResolver

pytestmark = pytest.mark.usefixtures("nowhere")


@pytest.mark.shows("tf.distribute.cluster_resolver.TPUClusterResolver")
def test_the_tpu_in_this_machine():
    resolver = TPUClusterResolver("local")
    assert not resolver.cluster_spec()
    assert resolver.master() == resolver.get_master() == "local"
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.get_job_name() == "worker"
    assert resolver.environment == ""
    assert set(resolver.num_accelerators()) == {"TPU"}


@pytest.mark.shows("TPUClusterResolver(tpu='')")
def test_local_by_name(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "local")
    assert TPUClusterResolver(tpu="").master() == "local"


@pytest.mark.parametrize(("chip", "devices"), [("0x0027", 8), ("0x0063", 4)])
def test_devices_in_this_machine(cards, chip, devices):
    """As Linux shows the bus: four chips, a card of Google, and somebody else's."""
    cards(*[("0x1ae0", chip)] * 4, ("0x1ae0", "0x0042"), ("0x8086", chip))
    assert TPUClusterResolver("local").num_accelerators() == {"TPU": devices}


@pytest.mark.usefixtures("cards")  # of which none is plugged in: there is no bus
def test_no_tpu_in_this_machine():
    resolver = TPUClusterResolver("local")
    assert resolver.num_accelerators() == {"TPU": 0}
    words = "TPU"
    with pytest.raises(RuntimeError, match=words):
        resolver.get_tpu_system_metadata()


def test_metadata_of_a_local_tpu(cards):
    cards(("0x1ae0", "0x0027"))
    resolver = TPUClusterResolver("local")
    resolver.set_tpu_topology(b"\x0a\x01")
    found = resolver.get_tpu_system_metadata()
    assert (found.num_cores, found.num_hosts, found.num_of_cores_per_host) == (2, 1, 2)
    assert found.topology == b"\x0a\x01"
    assert found.devices == (
        "/job:localhost/replica:0/task:0/device:TPU:0",
        "/job:localhost/replica:0/task:0/device:TPU:1",
    )


@pytest.mark.parametrize(
    ("tpu", "addresses", "master"),
    [
        ("grpc://10.1.2.3:8470", ["10.1.2.3:8470"], "grpc://10.1.2.3:8470"),
        (["grpc://10.1.2.3"], ["10.1.2.3:8470"], "grpc://10.1.2.3:8470"),
        ("grpc://a:1,grpc://b:2, c", ["a:1", "b:2", "c:8470"], "grpc://a:1"),
        ("tcp://[::1]:5", ["[::1]:5"], "tcp://[::1]:5"),
    ],
)
def test_addresses(tpu, addresses, master):
    resolver = TPUClusterResolver(tpu)
    assert resolver.cluster_spec().job_tasks("worker") == addresses
    assert resolver.master() == resolver.get_master() == master
    assert resolver.num_accelerators() == {}
    with pytest.raises(RuntimeError, match="TPU"):
        resolver.get_tpu_system_metadata()


def test_jobs_and_coordinator():
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
    with pytest.raises(ValueError, match=r"\b2\b.*'tpu_worker'"):
        resolver.master(task_id=2)


@pytest.mark.parametrize(
    "half", [{"coordinator_name": "c"}, {"coordinator_address": "a:1"}]
)
def test_half_a_coordinator(half):
    with pytest.raises(ValueError, match="coordinator_name"):
        TPUClusterResolver("local", **half)


def test_lists():
    with pytest.raises(ValueError, match="TPU"):
        TPUClusterResolver([])
    with pytest.raises(NotImplementedError, match="TPUs"):
        TPUClusterResolver(["a", "b"])


@pytest.mark.parametrize(
    "address", ["grpc://a:1,,grpc://b:1", "grpc://", "grpc://a:84x0", "grpc://a:"]
)
def test_an_address_that_is_none(monkeypatch, address):
    words = "expected addresses of TPU hosts, such as grpc://"
    with pytest.raises(ValueError, match=f"^tpu: {words}"):
        TPUClusterResolver(address)
    for name in ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"):
        monkeypatch.setenv(name, address)
        with pytest.raises(ValueError, match=f"^{name}: {words}"):
            TPUClusterResolver()


def test_an_address_of_many_colons_is_one_of_ipv6():
    resolver = TPUClusterResolver("grpc://[::1]:8470,grpc://[::2]")
    assert resolver.cluster_spec().as_dict() == {"worker": ["[::1]:8470", "[::2]:8470"]}


@pytest.mark.parametrize("hosts", ["a,", "a:b", "a:0:"])
def test_hosts_of_the_environment_that_cannot_be_read(monkeypatch, hosts):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
    with pytest.raises(ValueError, match="TPU_WORKER_HOSTNAMES"):
        TPUClusterResolver()


@pytest.mark.parametrize("number", ["x", "2", "-1", "9" * 5000])
def test_a_number_of_the_environment_that_is_none(monkeypatch, number):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", number)
    with pytest.raises(ValueError, match="TPU_WORKER_ID"):
        TPUClusterResolver()


@pytest.mark.parametrize("tpu", [None, ""])
def test_the_environment_in_its_order(monkeypatch, tpu):
    def master():
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


def test_a_node_of_the_environment(monkeypatch):
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
def test_a_configuration_that_is_none(monkeypatch, text):
    monkeypatch.setenv("TPU_CONFIG", text)
    with pytest.raises(ValueError, match=r"TPU_CONFIG.*JSON"):
        TPUClusterResolver()


def test_nobody_says_which_tpu():
    with pytest.raises(ValueError, match="TPU"):
        TPUClusterResolver()
