"""A TPU as Google describes it: its service, and the metadata server of its hosts."""

from zstrat.cluster import TPUClusterResolver

ATTRIBUTES = "/computeMetadata/v1/instance/attributes"


def tell(web, path, body, status=200):
    web.put(
        path, body, status, Metadata_Flavor="Google", Content_Type="application/text"
    )


def node(**others):
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

    def __init__(self, *answers):
        self.answers, self.names = list(answers), list[str]()

    def projects(self):
        return self

    locations = nodes = projects

    def get(self, *, name):
        self.names.append(name)
        return self

    def execute(self):
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def named(service, **options):
    return TPUClusterResolver(
        "my-tpu", "us-central2-b", "my-project", service=service, **options
    )
