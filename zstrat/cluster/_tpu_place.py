"""Which TPU is meant, where its hosts are, and how many devices each of them has.

What was said and what was found tell which TPU it is. Devices are counted as jax counts
them: a device is one core of a v2, v3 or 7x chip, and one chip of the other
generations, where both cores work as one.

Law of the file: it decides and does no I/O; the environment and the answers of services
come in as values.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

PORT: Final = 8470
"""Of a TPU's worker where none is said, as in TensorFlow."""

_ENDPOINTS: Final = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
_NAME: Final = "TPU_NAME"
_CONFIG: Final = "TPU_CONFIG"
_CONFIG_KEYS: Final = "tpu_node_name", "project", "zone"
_WORKERS: Final = "TPU_WORKER_HOSTNAMES"
_WORKER: Final = "TPU_WORKER_ID"
_KIND: Final = "TPU_ACCELERATOR_TYPE"

LOCAL_NAME: Final = "local"


@dataclass(frozen=True, slots=True)
class Local:
    """The TPU in this machine, used by this process alone."""


@dataclass(frozen=True, slots=True)
class TpuNode:
    """A TPU that Google Cloud knows by name; None: as this machine's."""

    name: str
    project: str | None
    zone: str | None


@dataclass(frozen=True, slots=True)
class TpuHosts:
    """A TPU whose hosts are known."""

    addresses: tuple[str, ...]
    scheme: str = "grpc"
    own: int = 0
    """Which of them this machine is."""
    accelerator: str | None = None


@dataclass(frozen=True, slots=True)
class Unsaid:
    """Nothing and nobody has said which TPU: this machine may be a host of one."""


Place = Local | TpuNode | TpuHosts | Unsaid


def find_place(
    tpu: str | list[str] | None,
    zone: str | None,
    project: str | None,
    env: Mapping[str, str],
) -> Place:
    """Which TPU is meant: by the argument, else by the variables of the environment.

    Raises:
        ValueError: An empty list, or a variable that cannot be read.
        NotImplementedError: Several TPUs.
    """
    if isinstance(tpu, list):
        if not tpu:
            raise ValueError("At least one TPU must be specified.")
        if len(tpu) > 1:
            raise NotImplementedError(
                "Using multiple TPUs in a single session is not yet implemented: "
                f"got {tpu}"
            )
        tpu = tpu[0]
    if not tpu and env.get(_ENDPOINTS):
        return hosts_at(env[_ENDPOINTS], _ENDPOINTS)
    name, source = tpu or env.get(_NAME), "tpu" if tpu else _NAME
    if not name and env.get(_CONFIG):
        said = _config(env[_CONFIG])
        name, source = said.get("tpu_node_name"), _CONFIG
        project, zone = project or said.get("project"), zone or said.get("zone")
    if name == LOCAL_NAME:
        return Local()
    if name:
        named = TpuNode(name, project, zone)
        return hosts_at(name, source) if "://" in name else named
    if env.get(_WORKERS):
        return hosts_of_machine(
            env[_WORKERS], env.get(_WORKER), env.get(_KIND), (_WORKERS, _WORKER)
        )
    return Unsaid()


def hosts_at(endpoints: str, source: str) -> TpuHosts:
    """Hosts of addresses such as ``grpc://10.0.0.1:8470,grpc://10.0.0.2:8470``.

    Args:
        source: Who has said so, for messages.

    Raises:
        ValueError: One of them is empty, or has a port that is none.
    """
    scheme, addresses = "grpc", []
    for endpoint in endpoints.split(","):
        before, separator, address = endpoint.strip().rpartition("://")
        if not _is_address(address):
            raise ValueError(
                f"{source}: expected addresses of TPU hosts, as grpc://host:port, "
                f"got {endpoints!r:.80}"
            )
        scheme = before if separator else scheme
        addresses.append(_with_port(address))
    return TpuHosts(tuple(addresses), scheme)


def hosts_of_machine(
    workers: str,
    own: str | None,
    accelerator: str | None,
    sources: tuple[str, str],
) -> TpuHosts:
    """Hosts as one of them is told: names, or ``name:id:address`` (the older form).

    Args:
        sources: Who has said the workers and the own number, for messages.

    Raises:
        ValueError: ``workers`` or ``own`` has another form.
    """
    addresses = []
    for worker in workers.split(","):
        parts = worker.strip().split(":")
        if len(parts) not in (1, 3) or not parts[-1]:
            raise ValueError(
                f"{sources[0]}: expected the hosts of a TPU, as names or as "
                f"name:id:address, got {workers!r:.80}"
            )
        addresses.append(_with_port(parts[-1]))
    number = own or "0"
    if number not in map(str, range(len(addresses))):
        raise ValueError(
            f"{sources[1]}: expected the number of this host of {len(addresses)}, got "
            f"{number!r:.80}"
        )
    return TpuHosts(tuple(addresses), own=int(number), accelerator=accelerator or None)


def hosts_of_node(name: str, node: Mapping[str, Any]) -> TpuHosts:
    """Hosts as Google Cloud's TPU service describes them.

    Raises:
        RuntimeError: The TPU is not ready.
    """
    if node.get("state") != "READY":
        raise RuntimeError(
            f'TPU "{name}" is not yet ready; state: "{node.get("state")}"'
        )
    ends = node.get("networkEndpoints") or []
    if not ends and "ipAddress" in node:
        ends = [node]  # older answers have only one host
    return TpuHosts(
        tuple(f"{end['ipAddress']}:{end.get('port') or PORT}" for end in ends),
        accelerator=node.get("acceleratorType"),
    )


def _config(text: str) -> Mapping[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or any(
        not isinstance(said.get(key, ""), str | None) for key in _CONFIG_KEYS
    ):
        raise ValueError(
            f'{_CONFIG}: expected a JSON object with "tpu_node_name", a string, got '
            f"{text!r:.80}"
        )
    return said


def _is_address(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    # Several colons are those of an IPv6 address.
    has_port = bool(host) and port.isascii() and port.isdecimal()
    return bool(address) and (not colon or ":" in host or has_port)


def _with_port(address: str) -> str:
    return address if re.search(r":[0-9]+$", address) else f"{address}:{PORT}"


_DEVICES_OF_A_COUNT: Final = {
    "v2": 1.0,
    "v3": 1.0,
    "v4": 0.5,
    "v5p": 0.5,
    "v5litepod": 1.0,
    "v6e": 1.0,
}
"""By the word before the number in the name of an accelerator. The number counts cores
up to v5p, where two make a device since v4, and chips since v5e."""


def devices_per_host(accelerator: str, hosts: int) -> int | None:
    """Devices of each host of an accelerator such as "v4-32"; None for a name that is
    newer than this file.

    Raises:
        RuntimeError: They are not the same on all hosts.
    """
    match = re.fullmatch(r"([a-z0-9]+)-([0-9]{1,9})", accelerator)
    if match is None or match[1] not in _DEVICES_OF_A_COUNT:
        return None
    devices = int(int(match[2]) * _DEVICES_OF_A_COUNT[match[1]])
    if hosts == 0 or devices % hosts:
        raise RuntimeError(
            f"TPU cores on each device is not the same: {devices} of {accelerator} on "
            f"{hosts} hosts. Are all of its hosts listed?"
        )
    return devices // hosts
