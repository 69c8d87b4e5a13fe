"""The Kubernetes objects of a cluster, for each kind of controller, as YAML.

=============  ==========================  ===========================  ==============
engine         parameter servers           workers                      program
=============  ==========================  ===========================  ==============
kubernetes     a StatefulSet               an indexed Job               a Job
jobset         replicated jobs of one JobSet, which ends with the program
tfjob          replicas of one TFJob, which ends with the program
=============  ==========================  ===========================  ==============

A replaced pod has the same name, and therefore the same address. Exit code 75 (a
restart helps) and evictions do not count as failures; 2 (invalid arguments) fails the
job at once.
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
"""The field with the index of a pod, since Kubernetes 1.28."""
_JOB_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def kubernetes(cluster: PodCluster) -> list[Object]:
    """Makes a cluster of standard objects, for Kubernetes 1.28 or newer."""
    addresses = _addresses(cluster)
    ps = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": cluster.metadata("-ps", "ps"),
        "spec": {
            "serviceName": cluster.name,
            "replicas": cluster.ps,
            # By default a server starts when the one before is ready; none needs that.
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
    # The service first: pods look up each other's names as soon as they run.
    return [_service(cluster), ps, *jobs, *_budgets(cluster)]


def jobset(cluster: PodCluster) -> list[Object]:
    """Makes one JobSet (jobset.sigs.k8s.io), which creates the service."""
    # Pod names of a JobSet contain the index of the replicated job, here always 0.
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
            # Daemons do not end by themselves.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [PROGRAM]},
            "replicatedJobs": replicated,
        },
    }
    return [made, *_budgets(cluster)]


def tfjob(cluster: PodCluster) -> list[Object]:
    """Makes one TFJob of Kubeflow's training operator, which sets TF_CONFIG itself."""
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
                # Ended pods stay, for their logs.
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
"""The function that makes the objects of an engine, by name of the engine."""


def manifests(engine: str, cluster: PodCluster) -> list[Object]:
    """Makes all objects of the cluster except its Secrets.

    Raises:
        ValueError: There is no such engine.
    """
    if engine not in KINDS:
        raise ValueError(f"engine {engine!r}: expected one of {', '.join(KINDS)}")
    return KINDS[engine](cluster)


def secrets_from(cluster: PodCluster, keys: Path) -> list[Object]:
    """Makes the Secrets of the cluster: one for each role, with its secret key and all
    public keys.

    Raises:
        ValueError: A key is missing in the folder.
    """
    # All public keys, so that each role recognizes all others; but one secret only.
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
    """Formats the objects as YAML, after comments with the commands to run before.

    Args:
        keys: The folder of the keys in these commands; "" if the objects include the
            Secrets.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: The name of the folder has a line break.
    """
    if not keys.isprintable():  # a line break would end the comment
        raise ValueError(
            f"keys={keys!r:.80}: expected a folder name without line break"
        )
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "manifests require PyYAML, which is not installed: "
            "pip install 'zstrat[kubernetes]'"
        ) from error
    # Copies shared parts, for which YAML would write references.
    plain = json.loads(json.dumps(objects))
    # Wide, as a folded TF_CONFIG cannot be read or copied.
    text: str = yaml.safe_dump_all(plain, sort_keys=False, width=4096)
    return "".join(f"# {line}\n" for line in _key_commands(cluster, keys)) + text


def _key_commands(cluster: PodCluster, keys: str) -> list[str]:
    if not (cluster.has_keys and keys):
        return []
    space = f" -n {cluster.namespace}" if cluster.namespace else ""
    folder = shlex.quote(keys)
    # As arguments of the shell ("$@"), which keep names with spaces in one piece.
    public = f'for file in {folder}/*.public; do set -- "$@" --from-file="$file"; done'
    return [
        "Run once, to create the keys of the cluster:",
        f"  zstrat keygen {folder}",
        f"  set --; {public}",
        *(
            f"  kubectl create secret generic {cluster.secret(job)}{space} "
            f'--from-file={folder}/{ROLES[job]}.secret "$@"'
            for job in JOBS
        ),
    ]


def _addresses(cluster: PodCluster, middle: str = "") -> dict[str, list[str]]:
    """Returns the DNS names of the pods of each role."""
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
    """Makes the spec of an indexed Job, whose pods keep their names."""
    count = cluster.count(job)
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": cluster.restarts,
        "podFailurePolicy": {
            # In order: the first one that matches counts. All else counts as a failure,
            # up to the limit.
            "rules": [
                _exit_code_rule(job, MISTAKEN, "FailJob"),
                _exit_code_rule(job, TRY_AGAIN, "Ignore"),
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


def _exit_code_rule(container: str, code: int, action: str) -> Object:
    codes = {"containerName": container, "operator": "In", "values": [code]}
    # kubectl up to 1.28 requires the empty list.
    return {"action": action, "onExitCodes": codes, "onPodConditions": []}


def _service(cluster: PodCluster) -> Object:
    """Makes the service, which gives pods DNS names before they are ready, because
    their peers wait for them at these names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": cluster.metadata(),
        "spec": {
            # Headless: the names lead to the pods themselves, not to a balancer.
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": cluster.labels(),
            "ports": [{"name": "zstrat", "port": cluster.port}],
        },
    }


def _budgets(cluster: PodCluster) -> list[Object]:
    """Makes disruption budgets that prevent voluntary evictions of parameter servers
    and of the program, which would lose unsaved state. Workers may be evicted."""
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": cluster.metadata(f"-{job}", job),
            "spec": {
                # Not maxUnavailable, which pods of Jobs do not support.
                "minAvailable": cluster.count(job),
                "selector": {"matchLabels": cluster.labels(job)},
            },
        }
        for job in ("ps", PROGRAM)
    ]
