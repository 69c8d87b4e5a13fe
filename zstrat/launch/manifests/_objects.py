"""The objects around the pods, for each engine of Kubernetes, and how they are written.

=============  ==========================  ===========================  ==============
engine         parameter servers           workers                      program
=============  ==========================  ===========================  ==============
kubernetes     a StatefulSet               an indexed Job               a Job
jobset         replicated jobs of one JobSet, which ends with the program
tfjob          replicas of one TFJob, which ends with the program
=============  ==========================  ===========================  ==============

A pod that is gone comes back under its name, and so at its address. Exit code 75 (not
done, and nothing is wrong) and evictions do not count as failures; 2 (told something
that cannot be) fails the job at once.
"""

from __future__ import annotations

import base64
import json
import shlex
from typing import TYPE_CHECKING, Final

from zstrat.config import MISTAKEN, TRY_AGAIN
from zstrat.transport import key_names

from ._pods import JOBS, PROGRAM, ROLES, Object, PodCluster, pod

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_POD_INDEX: Final = "metadata.labels['apps.kubernetes.io/pod-index']"
"""Since Kubernetes 1.28."""
_JOB_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def kubernetes(cluster: PodCluster) -> list[Object]:
    """A cluster made of what every Kubernetes from 1.28 on has."""
    addresses = _addresses(cluster)
    ps = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": cluster.metadata("-ps", "ps"),
        "spec": {
            "serviceName": cluster.name,
            "replicas": cluster.ps,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": cluster.labels("ps")},
            "template": pod(cluster, "ps", index=_POD_INDEX, addresses=addresses),
        },
    }
    jobs = [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": cluster.metadata(f"-{job}", job),
            "spec": _job(cluster, job, addresses, {"subdomain": cluster.name}),
        }
        for job in ("worker", PROGRAM)
    ]
    return [_service(cluster), ps, *jobs, *_budgets(cluster)]


def jobset(cluster: PodCluster) -> list[Object]:
    """One JobSet (jobset.sigs.k8s.io), which names the pods and makes the service."""
    # The pods of a JobSet have the number of their replicated job, too: there is one.
    addresses = _addresses(cluster, "-0")
    replicated = [
        {
            "name": job,
            "replicas": 1,
            "template": {"spec": _job(cluster, job, addresses, {})},
        }
        for job in JOBS
    ]
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": cluster.metadata(),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": cluster.name,
                "publishNotReadyAddresses": True,
            },
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [PROGRAM]},
            "replicatedJobs": replicated,
        },
    }
    return [made, *_budgets(cluster)]


def tfjob(cluster: PodCluster) -> list[Object]:
    """One TFJob of Kubeflow's training operator, which sets TF_CONFIG itself."""
    kinds = {"ps": "PS", "worker": "Worker", PROGRAM: "Chief"}
    replicas = {
        kind: {
            "replicas": cluster.count(job),
            # By its ExitCode it would give up at 75.
            "restartPolicy": "OnFailure",
            "template": pod(cluster, job, container="tensorflow"),
        }
        for job, kind in kinds.items()
    }
    made = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": cluster.metadata(),
        "spec": {
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": cluster.restarts,
            },
            "tfReplicaSpecs": replicas,
        },
    }
    return [made, *_budgets(cluster)]


KINDS: Final[Mapping[str, Callable[[PodCluster], list[Object]]]] = {
    "kubernetes": kubernetes,
    "jobset": jobset,
    "tfjob": tfjob,
}
"""By the name of the engine."""


def manifests(engine: str, cluster: PodCluster) -> list[Object]:
    """All objects of the cluster but for its Secrets.

    Raises:
        ValueError: There is no such engine.
    """
    if engine not in KINDS:
        raise ValueError(f"engine {engine!r}: expected one of {', '.join(KINDS)}")
    return KINDS[engine](cluster)


def secrets_from(cluster: PodCluster, keys: Path) -> list[Object]:
    """The Secrets of the cluster, with keys in them: one for each role, with its secret
    key and the public keys of all.

    Raises:
        ValueError: A key that is needed is not in the folder.
    """
    public = {f"{name}.public" for name in key_names(keys)}
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {**cluster.metadata(), "name": cluster.secret(job)},
            "type": "Opaque",
            "data": {
                name: base64.b64encode(_read(keys / name)).decode("ascii")
                for name in sorted({f"{ROLES[job]}.secret", *public})
            },
        }
        for job in JOBS
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror}; `zstrat keygen {path.parent}` "
            "makes the keys of a cluster"
        ) from error


def written(cluster: PodCluster, objects: list[Object], keys: str) -> str:
    """The objects as YAML, below what is to be typed before they are applied.

    Args:
        keys: The folder of the keys, for the words; "" if their Secrets are among the
            objects.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: The name of the folder would not stay on its line.
    """
    if not keys.isprintable():  # a new line would be YAML
        raise ValueError(f"keys={keys!r:.80}: expected a folder whose name is one line")
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "manifests are written by PyYAML, which is not installed here: "
            "pip install 'zstrat[kubernetes]'"
        ) from error
    # What several of them share is written out, and not as a reference.
    plain = json.loads(json.dumps(objects))
    text: str = yaml.safe_dump_all(plain, sort_keys=False, width=4096)
    return "".join(f"# {line}\n" for line in _steps(cluster, keys)) + text


def _steps(cluster: PodCluster, keys: str) -> list[str]:
    if not (cluster.has_keys and keys):
        return []
    space = f" -n {cluster.namespace}" if cluster.namespace else ""
    folder = shlex.quote(keys)
    public = f'for file in {folder}/*.public; do set -- "$@" --from-file="$file"; done'
    return [
        "Once, for the keys of the cluster:",
        f"  zstrat keygen {folder}",
        f"  set --; {public}",
        *(
            f"  kubectl create secret generic {cluster.secret(job)}{space} "
            f'--from-file={folder}/{ROLES[job]}.secret "$@"'
            for job in JOBS
        ),
    ]


def _addresses(cluster: PodCluster, middle: str = "") -> dict[str, list[str]]:
    """Where the pods of each role are, by the names that the service gives them."""
    name, port = cluster.name, cluster.port
    return {
        ROLES[job]: [
            f"{name}-{job}{middle}-{n}.{name}:{port}" for n in range(cluster.count(job))
        ]
        for job in JOBS
    }


def _job(
    cluster: PodCluster,
    job: str,
    addresses: Mapping[str, list[str]],
    network: Object,
) -> Object:
    """The spec of an indexed Job: its pods have names that stay."""
    count = cluster.count(job)
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": cluster.restarts,
        "podFailurePolicy": {
            "rules": [
                _at_exit(job, MISTAKEN, "FailJob"),
                _at_exit(job, TRY_AGAIN, "Ignore"),
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": pod(
            cluster,
            job,
            index=_JOB_INDEX,
            addresses=addresses,
            extra={**network, "restartPolicy": "Never"},
        ),
    }


def _at_exit(container: str, code: int, action: str) -> Object:
    codes = {"containerName": container, "operator": "In", "values": [code]}
    # The empty list: kubectl up to 1.28 demands that it is there.
    return {"action": action, "onExitCodes": codes, "onPodConditions": []}


def _service(cluster: PodCluster) -> Object:
    """Gives each pod its name before it is ready: its peers wait for it there."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": cluster.metadata(),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": cluster.labels(),
            "ports": [{"name": "zstrat", "port": cluster.port}],
        },
    }


def _budgets(cluster: PodCluster) -> list[Object]:
    """Nobody who may wait takes a parameter server or the program away: it would cost
    what was not saved. Workers may go at any time."""
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": cluster.metadata(f"-{job}", job),
            "spec": {
                # Not maxUnavailable, which the pods of Jobs do not know.
                "minAvailable": cluster.count(job),
                "selector": {"matchLabels": cluster.labels(job)},
            },
        }
        for job in ("ps", PROGRAM)
    ]
