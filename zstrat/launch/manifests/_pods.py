"""The pods of a cluster: what runs in each, as whom, with which keys, and how it is
probed.

Each pod is told who it is by TF_CONFIG, as TensorFlow's are, so a program needs nothing
but `TFConfigClusterResolver`. A pod can do little: it is nobody in particular, can gain
nothing, writes to ``/tmp`` alone, and has no token of the API server.
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
"""Whose key each has, and what TF_CONFIG calls it."""

USER: Final = 1000
"""Nobody in particular, but not root: clusters may refuse a pod that is root."""
GROUP: Final = 4711
"""Of the keys: nobody else has it (see "Kubernetes" in docs/engines.md)."""
TFJOBS_PORT: Final = "tfjob-port"
"""By this name the operator of TFJob finds the port for TF_CONFIG."""
DRAIN: Final = {"ps": 30, "worker": 30, PROGRAM: 120}
"""Seconds between SIGTERM and SIGKILL: of daemons above ZSTRAT_DRAIN, of the program
for a checkpoint."""

_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY: Final = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_RESOURCE: Final = re.compile(r"[a-z0-9]([-a-z0-9./]*[a-z0-9])?")
MAX_CLUSTER_NAME: Final = 40
"""Characters: "-program-0-0" and what controllers append have to fit into 63."""


@dataclass(frozen=True, slots=True)
class PodCluster:
    """What is to run.

    Args:
        name: Of all its objects, which begin with it.
        image: With zstrat, the program and what it imports.
        ps, workers: How many of each.
        program: The command of the program, as in ``("python", "train.py")``.
        namespace: "" for that of whoever applies the objects.
        resources: By job ("ps", "worker", "program"), as `resources_from` reads them.
        port: That all daemons bind.
        http_port: Where pods answer probes and Prometheus.
        has_keys: Whether the pods have keys, in Secrets named after cluster and role.
        restarts: How often a pod of each job may fail before the job has.

    Raises:
        ValueError: Something cannot be; says what was expected.
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
                f"name={self.name!r:.80}: expected small letters, digits and '-', a "
                f"letter first, at most {MAX_CLUSTER_NAME}"
            )
        if self.namespace and not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError(
                f"namespace={self.namespace!r:.80}: expected small letters, digits and "
                "'-', at most 63"
            )
        if self.restarts < 0:
            raise ValueError(f"restarts={self.restarts}: expected 0 or more")
        if not self.image or any(c.isspace() for c in self.image):
            raise ValueError(f"image={self.image!r:.80}: expected a name of an image")
        if self.ps < 1 or self.workers < 1:
            raise ValueError(
                f"ps={self.ps}, workers={self.workers}: expected 1 or more of each"
            )
        if not self.program:
            raise ValueError("which program? Give its command, as in: python train.py")
        if unknown := set(self.resources) - set(JOBS):
            raise ValueError(f"resources of {unknown}: expected those of {JOBS}")
        ports = (self.port, self.http_port)
        if self.port == self.http_port or not all(0 < p < 65536 for p in ports):
            raise ValueError(f"ports {ports}: expected two different ones below 65536")

    def count(self, job: str) -> int:
        return {"ps": self.ps, "worker": self.workers}.get(job, 1)

    def labels(self, job: str = "") -> dict[str, str]:
        """The labels of all objects of the cluster, or of the pods of one job."""
        found = {"app.kubernetes.io/part-of": "zstrat"}
        found["app.kubernetes.io/instance"] = self.name
        return {**found, "app.kubernetes.io/component": job} if job else found

    def metadata(self, suffix: str = "", job: str = "") -> Object:
        made: Object = {"name": f"{self.name}{suffix}"}
        if self.namespace:
            made["namespace"] = self.namespace
        return {**made, "labels": self.labels(job)}

    def secret(self, job: str) -> str:
        return f"{self.name}-{ROLES[job]}"


def resources_from(text: str) -> dict[str, str]:
    """The resources that ``cpu=4,memory=8Gi,nvidia.com/gpu=1`` says.

    Raises:
        ValueError: It is written otherwise.
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    for name, _, amount in pairs:
        if not _RESOURCE.fullmatch(name) or not _QUANTITY.fullmatch(amount):
            raise ValueError(
                f"resources {text!r:.80}: expected NAME=AMOUNT,..., as in "
                "cpu=4,memory=8Gi,nvidia.com/gpu=1"
            )
    found = {name: amount for name, _, amount in pairs}
    if len(found) < len(pairs):
        twice = next(n for n in found if sum(n == name for name, _, _ in pairs) > 1)
        raise ValueError(f"resources {text!r:.80}: {twice} is there more than once")
    return found


def pod(
    cluster: PodCluster,
    job: str,
    *,
    container: str = "",
    index: str = "",
    addresses: Mapping[str, list[str]] | None = None,
    extra: Object | None = None,
) -> Object:
    """The template of the pods of one job.

    Args:
        container: Its name; "": that of the job. An operator finds it by this name.
        index: The field of a pod that has its index; "" for the program.
        addresses: For TF_CONFIG, by role; None where the engine sets it.
        extra: More fields of the pods' spec.
    """
    spec: Object = {
        "automountServiceAccountToken": False,
        # Kubernetes would set ZSTRAT_..._PORT for services of such names.
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
        made["command"] = [DAEMONS[job], "--bind", f"*:{cluster.port}"]
        made["command"] += ["--http", f"*:{cluster.http_port}"]
    else:
        # Kubernetes would put its variables in: $(HOME), and $$ is one dollar to it.
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
        # No limit of processor time: it would stop threads that others wait for.
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
            number = "$(INDEX)"  # Kubernetes puts it in: INDEX stands above
        config = json.dumps({"cluster": addresses})[:-1]
        task = f'"task": {{"type": "{ROLES[job]}", "index": "{number}"}}'
        env.append({"name": "TF_CONFIG", "value": f"{config}, {task}}}"})
    env.append({"name": "HOME", "value": "/tmp"})
    if cluster.has_keys:
        env.append({"name": "ZSTRAT_KEYS", "value": "/keys"})
    else:
        env.append({"name": "ZSTRAT_INSECURE", "value": "1"})
    if job == PROGRAM:
        http = f"*:{cluster.http_port}"
        env.append({"name": "ZSTRAT_HTTP", "value": http})
        # Until all images are there, and all pods have a place.
        env.append({"name": "ZSTRAT_CONNECT_TIMEOUT", "value": "1800"})
    return env


def _probes() -> Object:
    """The probes of a daemon. A program has none: nobody knows what it does before it
    has a session."""
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
        # 0400: Kubernetes adds reading by the group of fsGroup, and by nobody else.
        secret = {"secretName": cluster.secret(job), "defaultMode": 0o400}
        volumes.append({"name": "keys", "secret": secret})
    return volumes
