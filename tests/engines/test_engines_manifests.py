"""Manifests as Kubernetes itself would take them: by its own schemas, and strictly."""

import pytest

from zstrat.launch.manifests import KINDS, PodCluster, manifests, secrets_from
from zstrat.transport import generate_keys

validate = pytest.importorskip(
    "kubernetes_validate", reason="pip install kubernetes-validate"
)

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("version", ["1.28", "1.37"])
@pytest.mark.parametrize("engine", KINDS)
def test_objects_are_valid(engine, version, tmp_path):
    """JobSet and TFJob are no kinds of Kubernetes: of these their pods are."""
    resources = {"worker": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}}
    cluster = PodCluster("a", "i", 2, 3, ("p",), resources=resources)
    generate_keys(tmp_path / "keys")
    for each in (
        *manifests(engine, cluster),
        *secrets_from(cluster, tmp_path / "keys"),
    ):
        match each["kind"]:
            case "JobSet":
                jobs = each["spec"]["replicatedJobs"]
                parts = [job["template"]["spec"] for job in jobs]
                objects = [
                    {
                        "apiVersion": "batch/v1",
                        "kind": "Job",
                        "metadata": {"name": "a"},
                        "spec": spec,
                    }
                    for spec in parts
                ]
            case "TFJob":
                replicas = each["spec"]["tfReplicaSpecs"].values()
                objects = [
                    {
                        "apiVersion": "v1",
                        "kind": "Pod",
                        "metadata": {"name": "a", **replica["template"]["metadata"]},
                        "spec": replica["template"]["spec"],
                    }
                    for replica in replicas
                ]
            case _:
                objects = [each]
        for known in objects:
            validate.validate(known, version, strict=True)
