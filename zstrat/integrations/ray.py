"""Integration with Ray Train: synchronous training by the workers of a Ray trainer.

    from ray.train import ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from zstrat.integrations.ray import ZstratConfig

    def train():
        strategy = zs.MultiWorkerMirroredStrategy()
        ...
        ray.train.report({"loss": loss})

    DataParallelTrainer(
        train,
        backend_config=ZstratConfig(),
        scaling_config=ScalingConfig(num_workers=4),
    ).fit()

Each worker of the trainer becomes a worker of one zstrat cluster, which TF_CONFIG
describes. Keys are generated for each start, and Ray sends them to the workers. Ray
passes reports of workers to the trainer; and when a worker is lost, Ray restarts all of
them (`FailureConfig`) from the checkpoint that was reported last.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray.train.backend import Backend, BackendConfig

from zstrat.cluster import free_ports, host_and_port
from zstrat.config import set_environment
from zstrat.launch.fleet import RunKeys, write_keys

_IN_MEMORY: Final = Path("/dev/shm")
_REMOVING: Final = ("/bin/sh", "-c", 'read -r _; rm -rf -- "$0"')
"""A command that removes a folder when its standard input ends, which happens when the
worker ends for any reason."""


@dataclass
class ZstratConfig(BackendConfig):  # type: ignore[misc]  # Ray has no types
    """Configures the workers of a Ray trainer as one zstrat cluster."""

    @property
    def backend_cls(self) -> type[Backend]:
        return ZstratBackend

    def to_dict(self) -> dict[str, Any]:
        return {}


class ZstratBackend(Backend):  # type: ignore[misc]  # Ray has no types
    """Gives each worker the addresses and keys of all before the program runs, and
    removes the keys after it."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray when all workers have started."""
        del backend_config
        # All addresses before any worker begins: each one needs all of them.
        keys = _fresh_keys()
        addresses = worker_group.execute(own_address)
        started = [
            worker_group.execute_single_async(
                index, become_worker, addresses, index, keys
            )
            for index in range(len(addresses))
        ]
        # Raises what a worker raised.
        ray.get(started)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray at the end, also after workers were lost."""
        del backend_config
        worker_group.execute(forget_keys)


_remover: subprocess.Popen[bytes] | None = None
"""The process that will remove the keys of this worker; None before it has keys."""


def own_address() -> str:
    """Returns, in a worker, the address at which other workers can reach it. The port
    is free now; the program binds it later, when it creates its strategy."""
    node = ray.get_runtime_context().get_node_id()
    (host,) = (
        each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node
    )
    (port,) = free_ports(1, host)
    return host_and_port(host, port)


def become_worker(addresses: list[str], index: int, keys: dict[str, str]) -> None:
    """Sets, in a worker, the environment variables from which strategies read the
    cluster."""
    global _remover
    forget_keys()  # of an earlier start, in the same process
    task = {"type": "worker", "index": index}
    cluster = {"worker": addresses}
    set_environment("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    # Each strategy that the program makes reads them: they stay until the end.
    place = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="zstrat-keys-", dir=place))
    # Before the keys are written. Not `atexit`: Ray kills workers.
    _remover = subprocess.Popen(
        [*_REMOVING, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a signal to the group of the worker does not end it
    )
    write_keys(folder / "keys", keys)
    set_environment("ZSTRAT_KEYS", str(folder / "keys"))


def forget_keys() -> None:
    """Removes the keys of this worker, and returns when they are removed."""
    global _remover
    remover, _remover = _remover, None
    if remover is not None:
        # Closes its input and waits for its end.
        remover.communicate()


def _fresh_keys() -> dict[str, str]:
    """Generates the keys of a worker: its secret key, and the public keys of all
    workers."""
    with tempfile.TemporaryDirectory(prefix="zstrat-keys-") as folder:
        keys = RunKeys(Path(folder, "keys"))
        keys.make()
        return keys.of("worker")
