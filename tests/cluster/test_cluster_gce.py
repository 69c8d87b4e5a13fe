"""Instance groups as Compute Engine answers, to a double and to Google's library."""

import json
import sys

import pytest

from zstrat.cluster import GCEClusterResolver, UnionResolver

ZONE = "https://www.googleapis.com/compute/v1/projects/my-project/zones/us-east1-d"


def listing(*names, page=None, status="RUNNING"):
    """An answer to instanceGroups.listInstances; without instances it has no items."""
    answer = {
        "kind": "compute#instanceGroupsListInstances",
        "id": "projects/my-project/zones/us-east1-d/instanceGroups/my-group",
        "selfLink": f"{ZONE}/instanceGroups/my-group/listInstances",
    }
    if names:
        answer["items"] = [
            {"instance": f"{ZONE}/instances/{name}", "status": status} for name in names
        ]
    if page:
        answer["nextPageToken"] = page
    return answer


def instance(name, address):
    """An answer to instances.get (shortened)."""
    interface = {
        "kind": "compute#networkInterface",
        "network": "https://www.googleapis.com/compute/v1/projects/p/global/networks/d",
        "name": "nic0",
        "accessConfigs": [{"type": "ONE_TO_ONE_NAT", "natIP": "34.1.2.3"}],
    }
    if address:
        interface["networkIP"] = address
    return {
        "kind": "compute#instance",
        "id": "5120441337",
        "name": name,
        "status": "RUNNING",
        "networkInterfaces": [interface],
    }


class Request:
    def __init__(self, answer):
        self.answer = answer

    def execute(self):
        return self.answer


class Service:
    """The "compute" service, with its methods' true names and arguments."""

    def __init__(self, pages, addresses):
        self.pages, self.addresses = pages, addresses

    def instanceGroups(self):
        return self

    def instances(self):
        return self

    def listInstances(self, *, project, zone, instanceGroup, body, orderBy):
        assert (project, zone, instanceGroup) == (
            "my-project",
            "us-east1-d",
            "my-group",
        )
        assert (body, orderBy) == ({"instanceState": "RUNNING"}, "name")
        return self._page(0)

    def listInstances_next(self, previous_request, previous_response):
        token = previous_response.get("nextPageToken")
        return self._page(int(token)) if token else None

    def _page(self, number):
        more = str(number + 1) if number + 1 < len(self.pages) else None
        return Request(listing(*self.pages[number], page=more))

    def get(self, *, project, zone, instance):
        assert (project, zone) == ("my-project", "us-east1-d")
        return Request(globals()["instance"](instance, self.addresses[instance]))


GROUP = ("my-project", "us-east1-d", "my-group", 8470)


def resolver_for(pages, **options):
    names = [name for page in pages for name in page]
    addresses = {name: f"10.1.0.{len(names) - at}" for at, name in enumerate(names)}
    return GCEClusterResolver(*GROUP, service=Service(pages, addresses), **options)


def test_instances_are_in_the_order_of_their_addresses():
    resolver = resolver_for([["a", "b"], ["c"]])
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.1.0.1:8470", "10.1.0.2:8470", "10.1.0.3:8470"]
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == "grpc://10.1.0.1:8470"
    assert resolver.master(task_id=2) == "grpc://10.1.0.3:8470"
    assert resolver.master("worker", 1, "tcp") == "tcp://10.1.0.2:8470"
    assert (resolver.environment, resolver.num_accelerators()) == ("", {})
    with pytest.raises(ValueError, match=r"\b3\b.*'worker'"):
        resolver.master(task_id=3)


def test_task():
    resolver = resolver_for([["a", "b"]], task_type="ps", task_id=1, rpc_layer=None)
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["10.1.0.1:8470", "10.1.0.2:8470"]
    }
    assert resolver.master() == "10.1.0.2:8470"
    resolver.task_id, resolver.rpc_layer = 0, "tcp"
    assert resolver.master() == "tcp://10.1.0.1:8470"
    resolver.task_id = None
    assert resolver.master() == ""
    with pytest.raises(RuntimeError, match=r"task_type.*GCE"):
        resolver.task_type = "worker"


def test_a_group_without_instances():
    assert resolver_for([[]]).cluster_spec().num_tasks("worker") == 0


def test_an_instance_without_an_address():
    resolver = GCEClusterResolver(*GROUP, service=Service([["a"]], {"a": None}))
    with pytest.raises(RuntimeError, match=r"'a'.*'my-group'"):
        resolver.cluster_spec()


def test_groups_are_united():
    union = UnionResolver(
        resolver_for([["a", "b"]]), resolver_for([["c"]], task_type="ps")
    )
    assert union.cluster_spec().as_dict() == {
        "worker": ["10.1.0.1:8470", "10.1.0.2:8470"],
        "ps": ["10.1.0.1:8470"],
    }


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    resolver = GCEClusterResolver(*GROUP)
    with pytest.raises(ImportError, match=r"'zstrat\[gce\]'"):
        resolver.cluster_spec()


def test_the_true_requests():
    """By the description of the service that the library brings: it refuses names and
    arguments that there are not."""
    discovery = pytest.importorskip("googleapiclient.discovery")
    from googleapiclient.http import HttpMockSequence

    def answer(body):
        return {"status": "200"}, json.dumps(body)

    http = HttpMockSequence(
        [
            answer(listing("a", page="CAEQAQ")),
            answer(listing("b")),
            answer(instance("a", "10.1.0.2")),
            answer(instance("b", "10.1.0.1")),
        ]
    )
    service = discovery.build("compute", "v1", http=http, static_discovery=True)
    spec = GCEClusterResolver(*GROUP, service=service).cluster_spec()
    assert spec.job_tasks("worker") == ["10.1.0.1:8470", "10.1.0.2:8470"]
    group = "/instanceGroups/my-group/listInstances?orderBy=name"
    uris = [uri for uri, *_ in http.request_sequence]
    assert group in uris[0]
    assert json.loads(http.request_sequence[0][2]) == {"instanceState": "RUNNING"}
    assert group in uris[1]
    assert "pageToken=CAEQAQ" in uris[1]
    assert [uri.partition("?")[0].rpartition("/projects/")[2] for uri in uris[2:]] == [
        "my-project/zones/us-east1-d/instances/a",
        "my-project/zones/us-east1-d/instances/b",
    ]


def test_a_group_that_is_not_there():
    discovery = pytest.importorskip("googleapiclient.discovery")
    from googleapiclient.errors import HttpError
    from googleapiclient.http import HttpMockSequence

    message = "The resource 'projects/my-project/.../my-group' was not found"
    body = {"error": {"code": 404, "message": message, "errors": []}}
    http = HttpMockSequence([({"status": "404"}, json.dumps(body))])
    service = discovery.build("compute", "v1", http=http, static_discovery=True)
    with pytest.raises(HttpError, match="my-group' was not found"):
        GCEClusterResolver(*GROUP, service=service).cluster_spec()


def test_a_machine_without_credentials(monkeypatch, tmp_path):
    pytest.importorskip("googleapiclient")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    resolver = GCEClusterResolver(*GROUP)
    with pytest.raises(RuntimeError, match="no Google credentials on this machine"):
        resolver.cluster_spec()
