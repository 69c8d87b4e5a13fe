"""Pods as the API server lists them, asked by the real client library."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from zstrat.cluster import ExecutableLocation, KubernetesClusterResolver

PODS = "/api/v1/pods"


def pod(name, ip, phase="Running"):
    """A pod of a Job, as `GET /api/v1/pods` shows it (shortened)."""
    status = {
        "phase": phase,
        "qosClass": "Burstable",
        "conditions": [
            {
                "type": "Ready",
                "status": "True" if phase == "Running" else "False",
                "lastProbeTime": None,
                "lastTransitionTime": "2024-05-02T09:14:30Z",
            }
        ],
    }
    if phase != "Pending":
        status |= {
            "hostIP": "172.18.0.3",
            "hostIPs": [{"ip": "172.18.0.3"}],
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "startTime": "2024-05-02T09:14:27Z",
        }
    return {
        "metadata": {
            "name": name,
            "generateName": f"{name.rpartition('-')[0]}-",
            "namespace": "default",
            "uid": "8f7d2c1e-2f0c-4d52-a8a5-8c8b3d1e7a10",
            "resourceVersion": "271154",
            "creationTimestamp": "2024-05-02T09:14:27Z",
            "labels": {"job-name": "tensorflow"},
        },
        "spec": {
            "containers": [
                {
                    "name": "worker",
                    "image": "registry.example/train:1",
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                    "imagePullPolicy": "IfNotPresent",
                }
            ],
            "restartPolicy": "Never",
            "hostNetwork": True,
            "nodeName": "node-1",
        },
        "status": status,
    }


def pod_list(*pods):
    return {
        "kind": "PodList",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": "271340"},
        "items": list(pods),
    }


@pytest.fixture
def kubeconfig(web, tmp_path, monkeypatch):
    """Writes the file that kubectl uses, for the server of the test."""
    path = tmp_path / "config"

    def write(server=f"http://{web.host}"):
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "c", "cluster": {"server": server}}],
                    "users": [{"name": "u", "user": {"token": "abc"}}],
                    "contexts": [
                        {"name": "test", "context": {"cluster": "c", "user": "u"}}
                    ],
                }
            )
        )

    default = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(default, str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return write


def test_a_client_of_ones_own(web):
    web.put(
        f"{PODS}?labelSelector=job-name%3Dtensorflow",
        pod_list(pod("tf-b", "10.0.0.2"), pod("tf-a", "10.0.0.9")),
        Content_Type="application/json",
    )
    client = importlib.import_module("kubernetes.client")
    with client.ApiClient(client.Configuration(host=f"http://{web.host}")) as api:
        resolver = KubernetesClusterResolver(override_client=client.CoreV1Api(api))
        assert resolver.cluster_spec().as_dict() == {
            "worker": ["10.0.0.9:8470", "10.0.0.2:8470"]
        }
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.num_accelerators() == {}


def test_the_client_of_this_place(web, kubeconfig):
    kubeconfig()
    json_type = {"Content_Type": "application/json"}
    web.put(
        f"{PODS}?labelSelector=role%3Dw%2Ctier%3Da",
        pod_list(pod("w-1", "10.0.0.3"), pod("w-0", "10.0.0.2")),
        **json_type,
    )
    spare = pod_list(pod("a-0", "10.0.0.7"))
    web.put(f"{PODS}?labelSelector=role%3Dspare", spare, **json_type)
    web.put(f"{PODS}?labelSelector=role%3Dps", pod_list(), **json_type)
    resolver = KubernetesClusterResolver(
        {"worker": ["role=w,tier=a", "role=spare"], "ps": ["role=ps"]}, 2222
    )
    spec = resolver.cluster_spec()
    assert spec.job_tasks("worker") == [
        "10.0.0.2:2222",
        "10.0.0.3:2222",
        "10.0.0.7:2222",
    ]
    assert spec.num_tasks("ps") == 0
    assert {headers.get("authorization") for _, _, headers in web.asked} == {
        "Bearer abc"
    }
    resolver.task_type, resolver.task_id = "worker", 2
    assert resolver.master() == "grpc://10.0.0.7:2222"
    assert resolver.master("worker", 0, "tcp") == "tcp://10.0.0.2:2222"
    with pytest.raises(ValueError, match=r"\b3\b.*'worker'"):
        resolver.master("worker", 3)


def test_pods_know_who_they_are(monkeypatch):
    def seen(name, ip):
        status = SimpleNamespace(phase="Running", pod_ip=ip, host_ip="172.18.0.3")
        return SimpleNamespace(metadata=SimpleNamespace(name=name), status=status)

    class Double:
        def list_pod_for_all_namespaces(self, label_selector):
            pods = [seen(f"w-{n}", f"10.0.0.{n}") for n in (10, 9, 2)]
            return SimpleNamespace(items=[*pods, seen("w-0", "fd00::7")])

    def resolver(**given):
        within = ExecutableLocation.WITHIN_CLUSTER
        return KubernetesClusterResolver(
            override_client=Double(), executable_location=within, **given
        )

    monkeypatch.delenv("POD_NAME", raising=False)
    monkeypatch.setenv("HOSTNAME", "w-9")
    found = resolver()
    assert (found.task_type, found.task_id) == ("worker", 2)
    assert found.master() == "grpc://10.0.0.9:8470"
    assert found.master("worker", 3) == "grpc://10.0.0.10:8470"
    assert found.master("worker", 0) == "grpc://[fd00::7]:8470"
    monkeypatch.setenv("POD_NAME", "another")  # with hostNetwork, HOSTNAME is the host
    assert (found.task_type, found.task_id) == (None, None)
    assert resolver(address="host").master("worker", 1) == "grpc://172.18.0.3:8470"
    with pytest.raises(ValueError, match=r"'pod'.*'host'"):
        resolver(address="node")


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed", "Unknown"])
def test_a_pod_that_does_not_run(web, kubeconfig, phase):
    kubeconfig()
    pods = pod_list(pod("tf-0", "10.0.0.2"), pod("tf-1", "10.0.0.3", phase))
    web.put(PODS, pods, Content_Type="application/json")
    words = f'Pod "tf-1" is not running; phase: "{phase}"'
    with pytest.raises(RuntimeError, match=words):
        KubernetesClusterResolver().cluster_spec()


def test_an_account_that_may_not_ask(web, kubeconfig):
    kubeconfig()
    message = (
        'pods is forbidden: User "system:serviceaccount:default:default" cannot list '
        'resource "pods" in API group "" at the cluster scope'
    )
    web.put(
        PODS,
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": "Forbidden",
            "details": {"kind": "pods"},
            "code": 403,
        },
        403,
        Content_Type="application/json",
    )
    words = r"'job-name=tensorflow'.*\b403\b.*ClusterRole"
    with pytest.raises(RuntimeError, match=words):
        KubernetesClusterResolver().cluster_spec()


def test_nobody_answers(kubeconfig):
    kubeconfig("http://127.0.0.1:1")
    words = r"\b127\b.*\b0\b.*\b0\b"
    with pytest.raises(RuntimeError, match=words):
        KubernetesClusterResolver().cluster_spec()


@pytest.mark.parametrize(
    ("location", "words"),
    [
        (ExecutableLocation.WITHIN_CLUSTER, r"\(WITHIN_CLUSTER\): Service host/port"),
        (ExecutableLocation.OFF_CLUSTER, r"\(OFF_CLUSTER\): Invalid kube-config file"),
    ],
)
def test_a_place_that_knows_no_kubernetes(kubeconfig, location, words):
    resolver = KubernetesClusterResolver(executable_location=location)
    with pytest.raises(RuntimeError, match=f"cannot be reached from here {words}"):
        resolver.cluster_spec()


def test_a_pod_is_within_the_cluster(kubeconfig, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT", raising=False)
    with pytest.raises(RuntimeError, match=r"\(WITHIN_CLUSTER\)"):
        KubernetesClusterResolver().cluster_spec()


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    resolver = KubernetesClusterResolver()
    with pytest.raises(ImportError, match=r"'zstrat\[kubernetes\]'"):
        resolver.cluster_spec()


def test_a_client_of_ones_own_needs_no_library(monkeypatch):
    """Such as a double, or a client with other rights; it is asked as TF asks it."""
    monkeypatch.setitem(sys.modules, "kubernetes", None)

    class Double:
        def list_pod_for_all_namespaces(self, label_selector):
            assert label_selector == "job-name=tensorflow"
            status = SimpleNamespace(phase="Running", pod_ip="10.0.0.2")
            named = SimpleNamespace(name="tf-0")
            return SimpleNamespace(
                items=[SimpleNamespace(metadata=named, status=status)]
            )

    resolver = KubernetesClusterResolver(override_client=Double(), rpc_layer=None)
    assert resolver.master("worker", 0) == "10.0.0.2:8470"
