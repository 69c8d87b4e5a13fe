"""Determines the TPU to use, its hosts, and their numbers of devices.

Devices are counted as in jax: a device is one core of a v2, v3 or 7x chip, and one chip
of the other generations, whose two cores work as one.

Law: no I/O; the environment and the answers of services are arguments.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


PORT: Final = 8470
"""The default port of a TPU's worker, as in TensorFlow."""
_ENDPOINTS: Final = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
_NAME: Final = "TPU_NAME"
_CONFIG: Final = "TPU_CONFIG"
_CONFIG_KEYS: Final = "tpu_node_name", "project", "zone"
_WORKERS: Final = "TPU_WORKER_HOSTNAMES"
_WORKER: Final = "TPU_WORKER_ID"
_KIND: Final = "TPU_ACCELERATOR_TYPE"
LOCAL_NAME: Final = "local"


@dataclass(frozen=True, slots=True)
class LocalTpu:
    """The TPU in this machine, used by this process alone."""


@dataclass(frozen=True, slots=True)
class TpuNode:
    """A TPU with a name in Google Cloud. A ``project`` or ``zone`` of None is that of
    this machine."""

    name: str
    project: str | None
    zone: str | None


@dataclass(frozen=True, slots=True)
class TpuHosts:
    """A TPU whose hosts are known."""

    addresses: tuple[str, ...]
    scheme: str = "grpc"
    own: int = 0
    """The index of this machine among the hosts."""
    accelerator: str | None = None


TpuSource = LocalTpu | TpuNode | TpuHosts
"""The TPU to use: in this machine, by its name, or by its hosts."""


def find_tpu(
    tpu: str | list[str] | None,
    zone: str | None,
    project: str | None,
    env: Mapping[str, str],
) -> TpuSource | None:
    """Determines the TPU from the argument or else from the environment; None if they
    specify none. (This machine may still be a host of one.)

    Raises:
        ValueError: The list is empty, or a variable is invalid.
        NotImplementedError: There are several TPUs.
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
    # Addresses say more than a name, for which a service is asked.
    if not tpu and env.get(_ENDPOINTS):
        return hosts_at(env[_ENDPOINTS], _ENDPOINTS)
    # The source is for messages about the name.
    name, source = tpu or env.get(_NAME), "tpu" if tpu else _NAME
    if not name and env.get(_CONFIG):
        said = _config(env[_CONFIG])
        name, source = said.get("tpu_node_name"), _CONFIG
        project, zone = project or said.get("project"), zone or said.get("zone")
    if name == LOCAL_NAME:
        return LocalTpu()
    if name:
        named = TpuNode(name, project, zone)
        return hosts_at(name, source) if "://" in name else named
    if env.get(_WORKERS):
        return hosts_of_machine(
            env[_WORKERS], env.get(_WORKER), env.get(_KIND), (_WORKERS, _WORKER)
        )
    return None


def hosts_at(endpoints: str, source: str) -> TpuHosts:
    """Parses addresses such as ``grpc://10.0.0.1:8470,grpc://10.0.0.2:8470``.

    Args:
        source: The origin of the addresses, for messages.

    Raises:
        ValueError: An address is empty or has an invalid port.
    """
    scheme, addresses = "grpc", []
    for endpoint in endpoints.split(","):
        before, separator, address = endpoint.strip().rpartition("://")
        if not _is_address(address):
            raise ValueError(
                f"{source}: expected addresses of TPU hosts, such as grpc://host:port, "
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
    """Parses the hosts of a TPU as one of these hosts is given them: names, or
    ``name:id:address`` (an older form).

    Args:
        own: The index of this host; None: 0.
        sources: The origins of ``workers`` and ``own``, for messages.

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
    # Compared as text: Google never writes " 1" or "01".
    number = own or "0"
    if number not in map(str, range(len(addresses))):
        raise ValueError(
            f"{sources[1]}: expected the index of this host, below {len(addresses)}, "
            f"got {number!r:.80}"
        )
    return TpuHosts(tuple(addresses), own=int(number), accelerator=accelerator or None)


def hosts_of_node(name: str, node: Mapping[str, Any]) -> TpuHosts:
    """Reads the hosts from an answer of Google Cloud's TPU service.

    Raises:
        RuntimeError: The TPU is not ready.
    """
    # Before, some of its hosts may be missing in the answer.
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
"""Generation in the name of an accelerator -> devices per unit of the number in it. The
number counts cores up to v5p, of which two make a device since v4, and chips since
v5e."""


def devices_per_host(accelerator: str, hosts: int) -> int | None:
    """Returns the number of devices per host of an accelerator such as "v4-32"; None
    for an unknown generation.

    Raises:
        RuntimeError: The number is not the same on all hosts.
    """
    match = re.fullmatch(r"([a-z0-9]+)-([0-9]{1,9})", accelerator)
    if match is None or match[1] not in _DEVICES_OF_A_COUNT:
        return None
    devices = int(int(match[2]) * _DEVICES_OF_A_COUNT[match[1]])
    if hosts == 0 or devices % hosts:
        raise RuntimeError(
            f"TPU cores on each device is not the same: {devices} of {accelerator} on "
            f"{hosts} hosts. Check that all of its hosts are listed"
        )
    return devices // hosts
