"""The pods of a cluster: their commands, users, keys and probes.

TF_CONFIG describes the cluster and its own task to each pod, as in TensorFlow, so a
program only needs `TFConfigClusterResolver`. Pods have few rights: an unprivileged
user, no privilege escalation, a read-only file system except ``/tmp``, and no token of
the API server.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

Object = dict[str, Any]
"""An object of Kubernetes, or a part of one, as it is in JSON."""

PROGRAM: Final = "program"
JOBS: Final = ("ps", "worker", PROGRAM)
DAEMONS: Final = {"ps": "zstrat-ps", "worker": "zstrat-worker"}
ROLES: Final = {"ps": "ps", "worker": "worker", PROGRAM: "chief"}
"""The role of each job: names the key of its tasks, and is the job in TF_CONFIG."""

USER: Final = 1000
"""An arbitrary user id other than root, which clusters may refuse."""
GROUP: Final = 4711
"""The group id of the key files, used for nothing else (see "Kubernetes" in
docs/engines.md)."""
TFJOBS_PORT: Final = "tfjob-port"
"""The port name from which the operator of TFJob makes TF_CONFIG."""
DRAIN: Final = {"ps": 30, "worker": 30, PROGRAM: 120}
"""Seconds between SIGTERM and SIGKILL: for daemons above ZSTRAT_DRAIN, for the program
enough to save a checkpoint."""

_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY: Final = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_RESOURCE: Final = re.compile(r"[a-z0-9]([-a-z0-9./]*[a-z0-9])?")
MAX_CLUSTER_NAME: Final = 40
"""The most characters of a cluster's name: "-program-0-0" and what controllers append
have to fit into 63."""


@dataclass(frozen=True, slots=True)
class PodCluster:
    """The description of a cluster and its program.

    Args:
        name: The prefix of all object names.
        image: An image with zstrat, the program and its dependencies.
        ps, workers: Number of parameter servers and workers.
        program: The command line of the program, such as ``("python", "train.py")``.
        namespace: The namespace; "": that of kubectl.
        resources: By job ("ps", "worker", "program"), in the form of `resources_from`.
        port: The port of all daemons.
        http_port: The port for probes and Prometheus.
        has_keys: Whether the pods have keys, in Secrets named after cluster and role.
        restarts: Number of failed pods of a job before the job fails.

    Raises:
        ValueError: A value is invalid.
    """

    name: str
    image: str
    ps: int
    workers: int
    program: tuple[str, ...]
    namespace: str = ""
    resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    port: int = 2222
    http_port: int = 9100
    has_keys: bool = True
    restarts: int = 20

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.name) or len(self.name) > MAX_CLUSTER_NAME:
            raise ValueError(
                f"name={self.name!r:.80}: expected lowercase letters, digits and '-', "
                f"beginning with a letter, at most {MAX_CLUSTER_NAME} characters"
            )
        if self.namespace and not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError(
                f"namespace={self.namespace!r:.80}: expected lowercase letters, digits "
                "and '-', at most 63 characters"
            )
        if self.restarts < 0:
            raise ValueError(f"restarts={self.restarts}: expected 0 or more")
        if not self.image or any(c.isspace() for c in self.image):
            raise ValueError(f"image={self.image!r:.80}: expected an image name")
        if self.ps < 1 or self.workers < 1:
            raise ValueError(
                f"ps={self.ps}, workers={self.workers}: expected 1 or more of each"
            )
        if not self.program:
            raise ValueError("program=(): expected a command, such as python train.py")
        if unknown := set(self.resources) - set(JOBS):
            raise ValueError(f"resources of {unknown}: expected jobs of {JOBS}")
        ports = (self.port, self.http_port)
        if self.port == self.http_port or not all(0 < p < 65536 for p in ports):
            raise ValueError(f"ports {ports}: expected two distinct ports, 1 to 65535")

    def count(self, job: str) -> int:
        return {"ps": self.ps, "worker": self.workers}.get(job, 1)

    def labels(self, job: str = "") -> dict[str, str]:
        """Returns the labels of all objects, or of the pods of one job."""
        labels = {"app.kubernetes.io/part-of": "zstrat"}
        labels["app.kubernetes.io/instance"] = self.name
        return {**labels, "app.kubernetes.io/component": job} if job else labels

    def metadata(self, suffix: str = "", job: str = "") -> Object:
        metadata: Object = {"name": f"{self.name}{suffix}"}
        if self.namespace:
            metadata["namespace"] = self.namespace
        return {**metadata, "labels": self.labels(job)}

    def secret(self, job: str) -> str:
        return f"{self.name}-{ROLES[job]}"


def resources_from(text: str) -> dict[str, str]:
    """Parses resources such as ``cpu=4,memory=8Gi,nvidia.com/gpu=1``.

    Raises:
        ValueError: The text has another form, or names a resource twice.
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    for name, _, amount in pairs:
        if not _RESOURCE.fullmatch(name) or not _QUANTITY.fullmatch(amount):
            raise ValueError(
                f"resources {text!r:.80}: expected NAME=AMOUNT,..., such as "
                "cpu=4,memory=8Gi,nvidia.com/gpu=1"
            )
    amounts = {name: amount for name, _, amount in pairs}
    if len(amounts) < len(pairs):
        twice = next(n for n in amounts if sum(n == name for name, _, _ in pairs) > 1)
        raise ValueError(f"resources {text!r:.80}: {twice} is given more than once")
    return amounts


def pod(
    cluster: PodCluster,
    job: str,
    *,
    container: str = "",
    index: str = "",
    addresses: Mapping[str, list[str]] | None = None,
    extra: Object | None = None,
) -> Object:
    """Makes the template of the pods of one job.

    Args:
        container: The name of the container, by which an operator finds it; "": the
            name of the job.
        index: The field of a pod that has its index; "" for the program.
        addresses: The addresses for TF_CONFIG by role; None if the engine sets it.
        extra: More fields of the pods' spec.
    """
    spec: Object = {
        "automountServiceAccountToken": False,
        # Otherwise Kubernetes sets ZSTRAT_..._PORT for services of such names.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": DRAIN[job],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": GROUP,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **(extra or {}),
        "containers": [_container(cluster, job, container or job, index, addresses)],
        "volumes": _volumes(cluster, job),
    }
    return {"metadata": {"labels": cluster.labels(job)}, "spec": spec}


def _container(
    cluster: PodCluster,
    job: str,
    name: str,
    index: str,
    addresses: Mapping[str, list[str]] | None,
) -> Object:
    made: Object = {"name": name, "image": cluster.image}
    if job in DAEMONS:
        # Not the address in TF_CONFIG: a pod may not resolve its own name at first.
        made["command"] = [DAEMONS[job], "--bind", f"*:{cluster.port}"]
        made["command"] += ["--http", f"*:{cluster.http_port}"]
    else:
        # Kubernetes expands $(HOME) in commands; $$ is a literal dollar sign.
        made["command"] = [word.replace("$", "$$") for word in cluster.program]
    made["env"] = _environment(cluster, job, index, addresses)
    made["ports"] = [
        {
            "name": "zstrat" if name == job else TFJOBS_PORT,
            "containerPort": cluster.port,
        },
        {"name": "http", "containerPort": cluster.http_port},
    ]
    if job in DAEMONS:
        made |= _probes()
    if wanted := cluster.resources.get(job):
        # No CPU limit: throttling would stop threads on which others wait.
        limits = {name: each for name, each in wanted.items() if name != "cpu"}
        made["resources"] = {"requests": dict(wanted), "limits": limits}
    made["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    made["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    if cluster.has_keys:
        keys = {"name": "keys", "mountPath": "/keys", "readOnly": True}
        made["volumeMounts"].append(keys)
    return made


def _environment(
    cluster: PodCluster,
    job: str,
    index: str,
    addresses: Mapping[str, list[str]] | None,
) -> list[Object]:
    env: list[Object] = []
    if addresses is not None:
        number = "0"
        if index:
            env.append(
                {"name": "INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}}
            )
            # Expanded by Kubernetes, as INDEX is defined above, before TF_CONFIG.
            number = "$(INDEX)"
        # Without its closing brace; the task cannot come from json.dumps, as its index
        # is only known in the pod.
        config = json.dumps({"cluster": addresses})[:-1]
        task = f'"task": {{"type": "{ROLES[job]}", "index": "{number}"}}'
        env.append({"name": "TF_CONFIG", "value": f"{config}, {task}}}"})
    # The only folder that can be written.
    env.append({"name": "HOME", "value": "/tmp"})
    if cluster.has_keys:
        env.append({"name": "ZSTRAT_KEYS", "value": "/keys"})
    else:
        env.append({"name": "ZSTRAT_INSECURE", "value": "1"})
    if job == PROGRAM:
        # Daemons get the port as an option.
        http = f"*:{cluster.http_port}"
        env.append({"name": "ZSTRAT_HTTP", "value": http})
        # Pulling images and scheduling the pods may take long.
        env.append({"name": "ZSTRAT_CONNECT_TIMEOUT", "value": "1800"})
    return env


def _probes() -> Object:
    """Makes the probes of a daemon. A program has no probes: before it has a session it
    may do anything."""
    # Above the 5 s after which /healthz itself reports a loop that hangs.
    healthy = {"httpGet": {"path": "/healthz", "port": "http"}, "timeoutSeconds": 6}
    ready = {"httpGet": {"path": "/readyz", "port": "http"}, "timeoutSeconds": 6}
    return {
        # A worker imports jax before it answers.
        "startupProbe": {**healthy, "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {**healthy, "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {**ready, "periodSeconds": 5},
    }


def _volumes(cluster: PodCluster, job: str) -> list[Object]:
    volumes: list[Object] = [{"name": "tmp", "emptyDir": {}}]
    if cluster.has_keys:
        # 0400: Kubernetes adds read permission for the group of fsGroup only.
        secret = {"secretName": cluster.secret(job), "defaultMode": 0o400}
        volumes.append({"name": "keys", "secret": secret})
    return volumes
