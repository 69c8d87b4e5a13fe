"""Expands Slurm's short forms of the nodes of a job and of the tasks on each.

Law of the file: text in, lists out.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Final

MAX_HOSTS: Final = 64 * 1024
"""Largest expansion, Slurm's own limit for one range. A longer one is an error that
would exhaust the memory."""

_PART: Final = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_PIECE: Final = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_TASKS: Final = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Expands a list such as ``n[1-2],m5,o[3-4,6]-ib[0-1]``, in its order.

    Leading zeros of a range are kept: ``[08-10]`` is 08, 09, 10. With several brackets
    in one name the last one varies fastest, as in ``scontrol show hostnames``.
    Duplicates are kept.

    Raises:
        ValueError: The list is malformed, or has more than 65536 hosts.
    """
    hosts: list[str] = []
    try:
        for part in _parts(hostlist):
            hosts += _hosts(part)
            _check_size(len(hosts))
    except ValueError as error:
        words = f"Invalid hostlist format {hostlist!r:.80}: {error}"
        raise ValueError(words) from None
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Expands a list such as ``3(x2),2,1`` to 3, 3, 2, 1.

    Raises:
        ValueError: The list is malformed, or has more than 65536 nodes.
    """
    tasks: list[int] = []
    try:
        for part in tasks_per_node.split(","):
            match = _TASKS.fullmatch(part)
            if match is None:
                raise ValueError(f"expected 3 or 3(x2), got {part!r}")
            count, times = int(match[1]), int(match[2] or 1)
            _check_size(len(tasks) + times)
            tasks += [count] * times
    except ValueError as error:
        words = f"Invalid tasks-per-node list format {tasks_per_node!r:.80}: {error}"
        raise ValueError(words) from None
    return tasks


def natural_order(host: str) -> tuple[list[str | int], str]:
    """Key that sorts n9 before n10: the order in which Slurm numbers the nodes of a
    job. (n01 and n1 are two hosts; the name itself decides between them.)"""
    parts = re.split(r"([0-9]+)", host)  # texts and numbers in turn, a text first
    return [int(part) if at % 2 else part for at, part in enumerate(parts)], host


def _parts(hostlist: str) -> list[str]:
    """Splits the text at commas outside of brackets."""
    parts: list[str] = []
    at, end = 0, len(hostlist)
    while at < end:
        match = _PART.match(hostlist, at)
        if match is None:
            raise ValueError(f"expected a host at {hostlist[at:]!r:.20}")
        parts.append(match[0])
        at = match.end()
        if at < end and hostlist[at] != ",":
            raise ValueError(f"expected a comma at {hostlist[at:]!r:.20}")
        if at == end - 1:
            raise ValueError("expected a host after the last comma")
        at += 1
    return parts


def _hosts(part: str) -> list[str]:
    pieces = [
        [match[2]] if match[1] is None else _numbers(match[1])
        for match in _PIECE.finditer(part)
    ]
    _check_size(math.prod(map(len, pieces)))
    return ["".join(chosen) for chosen in itertools.product(*pieces)]


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"expected 3 or 3-5 in brackets, got {text!r:.40}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {text!r:.40} ends before it begins")
        _check_size(len(numbers) + last - first + 1)
        width = len(match[1])
        numbers += [str(number).zfill(width) for number in range(first, last + 1)]
    return numbers


def _check_size(hosts: int) -> None:
    if hosts > MAX_HOSTS:
        raise ValueError(f"it has {hosts} entries, and {MAX_HOSTS} is the limit")
