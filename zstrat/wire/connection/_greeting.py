"""Decides whether the two processes of a connection can work together, by the HELLO of
each.

A `Peer` calls `mismatch` with the first message of the other side, and refuses the
other side with the returned error. Compared are the protocol, the task, and, where one
side sends code to the other, the minor version of Python; `zstrat doctor` compares jax
and numpy, too.

When the error is made, the other side has proved nothing, so its names are cut to a
length that fits into a message and a line of the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from zstrat.errors import ProtocolError, VersionMismatchError, ZstratError
from zstrat.wire._link_messages import PROTOCOL, Hello, Job

_SHIPS_CODE: Final = frozenset({Job.CHIEF})
_TAKES_CODE: Final = frozenset({Job.WORKER, Job.PS, Job.EVALUATOR})
_JOBS: Final = frozenset(Job)

_NAME: Final = 255
"""Most characters of a name in a HELLO; no host has a longer name."""
_VERSIONS: Final = 16


def quoted(text: str, most: int) -> str:
    """Returns a stranger's text on one line, cut to ``most`` characters, without
    characters that could control a terminal or break a log."""
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def task_name(hello: Hello) -> str:
    """Returns the name of a task in messages to persons: ``worker:1``."""
    return f"{quoted(hello.job, 20)}:{hello.index}"


def described(hello: Hello) -> str:
    """Returns the name of a task with its host and process, for messages to persons."""
    return f"{task_name(hello)} (host {quoted(hello.host, 80)}, pid {hello.pid})"


def mismatch(
    me: Hello, other: Hello, expect: tuple[str, int | None] | None = None
) -> ZstratError | None:
    """Returns the error that says why ``me`` cannot work with ``other``, or None.

    Args:
        expect: Job and index of the task that must answer, if the caller knows; an
            index of None means any.
    """
    if other.protocol != PROTOCOL:
        return VersionMismatchError(
            f"{described(other)} speaks protocol {other.protocol} "
            f"(zstrat {quoted(other.versions.get('zstrat', 'unknown'), 40)}), "
            f"{described(me)} speaks {PROTOCOL} "
            f"(zstrat {me.versions.get('zstrat', 'unknown')}): "
            "install the same zstrat on both"
        )
    # After the protocol: another version may greet in another form.
    if not _is_plain(other):
        return ProtocolError(
            f"{described(other)} cannot be remembered by what it says of itself: "
            f"expected printable names of at most {_NAME} characters, and at most "
            f"{_VERSIONS} versions"
        )
    lowest = -1 if other.job == Job.WORKER else 0  # one without a number yet
    if other.job not in _JOBS or other.index < lowest:
        return ProtocolError(
            f"host {quoted(other.host, 80)}, pid {other.pid} calls itself "
            f"{task_name(other)}: expected one of {', '.join(Job)} and an index of "
            "0 or more"
        )
    if expect is not None and expect not in (
        (other.job, other.index),
        (other.job, None),
    ):
        wanted = expect[0] if expect[1] is None else f"{expect[0]}:{expect[1]}"
        return ProtocolError(
            f"expected {wanted}, but {described(other)} answers there: "
            "check the addresses of the cluster"
        )
    # Last, as it concerns only tasks that send code to each other.
    return _python_mismatch(me, other)


def _is_plain(hello: Hello) -> bool:
    """Returns whether the HELLO has only short printable names, so that it may be kept:
    thousands of strangers may send one."""
    versions = hello.versions
    if len(versions) > _VERSIONS:
        return False
    names = [hello.host, *versions, *versions.values()]
    return all(len(name) <= _NAME and name.isprintable() for name in names)


def _python_mismatch(me: Hello, other: Hello) -> ZstratError | None:
    """Returns an error if one side sends code to the other and their Python versions
    differ: functions travel as byte code, which only the same Python can run."""
    if not _ships(me, other) and not _ships(other, me):
        return None
    ours, theirs = map(_minor, (me.versions, other.versions))
    if ours is None or theirs is None or ours == theirs:
        return None
    return VersionMismatchError(
        f"{described(other)} runs Python {quoted(theirs, 40)}, "
        f"{described(me)} runs {ours}: step "
        "functions travel between them as byte code, which needs the same minor version"
    )


def _ships(one: Hello, other: Hello) -> bool:
    return one.job in _SHIPS_CODE and other.job in _TAKES_CODE


def _minor(versions: dict[str, str]) -> str | None:
    python = versions.get("python")
    return None if python is None else ".".join(python.split(".")[:2])


MismatchOf = Callable[[Hello], ZstratError | None]
"""Returns the error with which to refuse a HELLO, or None."""
