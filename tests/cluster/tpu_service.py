"""A TPU as Google describes it: its service, and the metadata server of its hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zstrat.cluster import TPUClusterResolver

if TYPE_CHECKING:
    from .conftest import Web

ATTRIBUTES = "/computeMetadata/v1/instance/attributes"


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
