"""Settings and their defaults; the only module that reads `os.environ`.

``ZSTRAT_*`` variables become `Settings` here, frozen values that are passed down from
the entry points. Variables of other systems (``TF_CONFIG``, ``SLURM_*``) are read by
their resolvers, through `environment`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

MiB: Final = 2**20

GRACE: Final = 1.0
"""Seconds that a task may take to close after its drain, the time for accepted
requests."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Durations in seconds."""

    beat: float = 0.5
    """Interval of heartbeats to a peer that received no other message."""
    liveness: float = 5.0
    """A peer that sent nothing for this long counts as lost. The default is ten
    heartbeats: a loaded machine may delay some of them, and a false loss repeats all
    requests in flight."""
    reconnect: float = 1.0
    """A broken connection has this long to be restored before its peer counts as
    lost."""
    handshake: float = 5.0
    connect: float = 60.0
    """How long a program waits for the tasks of its cluster when it starts."""
    turn: float = 0.0
    """How long a program waits for its turn while another live program owns the
    cluster."""
    resolve: float = 10.0
    """Interval at which a resolver whose answer may change is queried; after the loss
    of a worker it is queried sooner. A query is one small request to a service, or
    reads one file."""
    request: float = 120.0
    """Default deadline of a request: longer than the longest compile. Each part of a
    large body that arrives extends it by the same time."""
    drain: float = 10.0
    """After SIGTERM the accepted requests have this long to finish."""
    handover: float = 60.0
    """A parameter server with a state folder has this long to save its state when it is
    stopped; its clients then wait up to this time for the process that replaces it."""
    launcher: float = 300.0
    """A daemon that a program started on another machine ends after this long without a
    heartbeat of that program. Longer than people usually suspend a program."""

    @property
    def notice(self) -> float:
        """The time after which the loss of a program, or of its connection, is noticed.
        A program that owns a cluster and sends nothing keeps the cluster for this
        long."""
        return self.liveness + self.reconnect


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds, in bytes unless the name says otherwise, with their reasons."""

    header: int = 256 * 1024
    """Bytes of a message's header. Most headers are below 2 KiB; requests that create
    thousands of variables have larger ones."""
    frames: int = 4096
    """Buffer frames of one message. If a message has more arrays, they are sent as a
    body in chunks, and the limit of the header bounds their number."""
    frame: int = 4 * MiB
    """Largest ZeroMQ frame: libzmq drops the connection of a peer that sends a larger
    one."""
    chunk: int = MiB
    """A body larger than this is sent in frames of this size: the allocator reuses
    memory pages for them, which is three times faster than one large frame."""
    window: int = 12
    """Chunks of one stream in flight (a window for flow control): enough to keep both
    ends busy, few enough that they stay in the cache and that a slow reader costs its
    sender little memory."""
    body: int = 64 * 1024 * MiB
    """Largest announced body of one message."""
    streams: int = 256
    """Incomplete bodies that one peer may be sending at a time."""
    requests: int = 16384
    """Open requests of one peer at a time."""
    unread: int = 16 * MiB
    """Bytes of answers that a peer has not read yet. Above this the peer's further
    messages are not read either, up to the same size. It is more than ``window``
    chunks, and little compared with the variables of a parameter server."""
    inline: int = 64 * 1024
    """Results up to this size in bytes are sent with the message that their closure has
    ended; larger ones are fetched."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a task, fixed when it starts."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    transport: str = "auto"
    prefetch: int = 0
    """Optimizer steps for which a worker fetches values and rows in advance. Each of
    these steps makes gradients staler by as many updates as there are workers."""
    keys: Path | None = None
    insecure: bool = False
    log_json: bool = False
    traceback: str = "short"
    """Tracebacks of errors that public functions raise: "short" omits the frames of
    zstrat, "full" does not."""
    output: str = "program"
    """Where the output of workers is shown: "program": in the program and in their
    logs; "files": only in their logs. Set for a worker, it applies to all programs."""
    http: str = ""
    """HOST:PORT at which this process serves its health over HTTP; "": no server."""
    http_token: str = field(default="", repr=False)
    """Token that other machines need to see the status page; "": other machines cannot
    see it."""
    state: Path | None = None
    """A folder in which a parameter server saves its state when it is stopped, for the
    next process of its task. None: the state is lost."""
    spill: Path | None = None
    """A folder in which a parameter server keeps the rows of hash tables
    (`zs.HashTable`), in files that the kernel reads and writes by pages. None: rows
    stay in memory."""
    choices: Path | None = None
    """File with the algorithms for collective operations, as ``zstrat bench
    collectives`` writes it. None: built-in defaults."""


TRANSPORTS: Final = ("auto", "tcp", "ipc", "shm")
OUTPUTS: Final = ("program", "files")

MISTAKEN: Final = 2
"""Exit code of a process with invalid arguments: restarting it does not help."""
TRY_AGAIN: Final = 75
"""Exit code (EX_TEMPFAIL) of a process that ended early without an error: a supervisor
should restart it."""


def checked_transport(transport: str) -> str:
    """Returns the transport if it is valid.

    Raises:
        ValueError: There is no such transport.
    """
    if transport not in TRANSPORTS:
        raise ValueError(
            f"transport={transport!r}: expected one of {', '.join(TRANSPORTS)}"
        )
    return transport


def environment() -> Mapping[str, str]:
    """Returns the environment of this process, as it is now."""
    return os.environ


def set_environment(name: str, value: str) -> None:
    """Sets an environment variable of this process, for libraries that have no other
    interface."""
    os.environ[name] = value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a hint with the name in ``known`` that is closest to an unknown ``name``,
    for the end of an error message; "" if none is close."""
    closest = get_close_matches(name, list(known), n=1)
    return f"; did you mean {closest[0]!r}?" if closest else ""


def settings_from(env: Mapping[str, str]) -> Settings:
    """Reads the settings of this process from ``ZSTRAT_*``.

    Raises:
        ValueError: A variable has an invalid value, or the name of a variable is a
            misspelling of a known one.
    """
    _check_names(env)
    seconds = {
        field: _seconds(name, env[name])
        for name, field in _DURATIONS.items()
        if name in env
    }
    others = {
        field: read(name, env[name])
        for name, (field, read) in _OTHERS.items()
        if name in env
    }
    return Settings(Timeouts(**seconds), **others)


def daemon_variables(settings: Settings) -> dict[str, str]:
    """Returns the variables that pass the program's settings to daemons it starts.

    Raises:
        ValueError: A setting has a value that daemons do not accept.
    """
    variables = {
        name: str(getattr(settings.timeouts, _DURATIONS[name]))
        for name in _DURATIONS_OF_DAEMONS
    }
    if settings.state is not None:
        variables["ZSTRAT_STATE"] = str(settings.state)
    if settings.spill is not None:
        variables["ZSTRAT_SPILL"] = str(settings.spill)
    settings_from(variables)  # fails here instead of in the daemon
    return variables


def read_toml(path: str | os.PathLike[str]) -> dict[str, object]:
    """Reads a TOML file.

    Raises:
        ValueError: The file cannot be read, or is not valid TOML.
    """
    import tomllib  # only here: all processes import this module, few read TOML

    try:
        # Editors on Windows write a byte order mark before the text.
        return tomllib.loads(Path(path).read_text("utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _check_names(env: Mapping[str, str]) -> None:
    """Refuses misspelled ``ZSTRAT_*`` variables. Other unknown names are allowed:
    Kubernetes sets ZSTRAT_PS_PORT, for example, for a service named zstrat-ps.

    Raises:
        ValueError: The name of a variable is close to a known one.
    """
    for name in env:
        if name.startswith("ZSTRAT_") and name not in NAMES:
            for closest in get_close_matches(name, NAMES, n=1, cutoff=0.9):
                raise ValueError(
                    f"unknown environment variable {name}; did you mean {closest}?"
                )


Read = Callable[[str, str], Any]
"""A function that converts the text of an environment variable to a setting. Its
arguments are the name of the variable, for errors, and the text."""


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        # Refused below, with the same words.
        value = -1.0
    if not 0 < value < 86400:
        raise ValueError(f"{name}={text!r}: expected seconds, above 0 and below a day")
    least = 2 * _BEAT if name == "ZSTRAT_LIVENESS" else 0.0
    if value < least:
        raise ValueError(
            f"{name}={text!r}: expected {least:g} seconds or more, as live peers send "
            f"a heartbeat only every {_BEAT:g} s"
        )
    return value


def _prefetch(name: str, text: str) -> int:
    # `int` also takes signs, underscores and the digits of other scripts.
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise ValueError(f"{name}={text!r}: expected a number of steps, 0 or more")
    return int(text)


def _path(name: str, text: str) -> Path | None:
    del name
    return Path(text) if text else None


def _text(name: str, text: str) -> str:
    del name
    return text


def _one_of(*choices: str) -> Read:
    def read(name: str, text: str) -> str:
        if text not in choices:
            named = ", ".join(choice for choice in choices if choice)
            raise ValueError(f"{name}={text!r}: expected one of {named}")
        return text

    return read


def _is(word: str, *others: str) -> Read:
    """Makes a `Read` that returns True for ``word`` and False for one of ``others``."""
    read = _one_of(*others, word)
    return lambda name, text: read(name, text) == word


_BEAT: Final = Timeouts().beat

_DURATIONS: Final = {
    "ZSTRAT_CONNECT_TIMEOUT": "connect",
    "ZSTRAT_DRAIN": "drain",
    "ZSTRAT_HANDOVER": "handover",
    "ZSTRAT_LAUNCHER_TIMEOUT": "launcher",
    "ZSTRAT_LIVENESS": "liveness",
    "ZSTRAT_REQUEST": "request",
    "ZSTRAT_RESOLVE": "resolve",
    "ZSTRAT_TURN": "turn",
}
"""Environment variable -> the field of `Timeouts` that it sets."""

_DURATIONS_OF_DAEMONS: Final = (
    "ZSTRAT_CONNECT_TIMEOUT",
    "ZSTRAT_DRAIN",
    "ZSTRAT_HANDOVER",
    "ZSTRAT_LIVENESS",
    "ZSTRAT_REQUEST",
)
"""Variables with durations on which the daemons and their program have to agree."""

_OTHERS: Final[Mapping[str, tuple[str, Read]]] = {
    "ZSTRAT_CHOICES": ("choices", _path),
    "ZSTRAT_HTTP": ("http", _text),
    "ZSTRAT_HTTP_TOKEN": ("http_token", _text),
    "ZSTRAT_INSECURE": ("insecure", _is("1", "", "0")),
    "ZSTRAT_KEYS": ("keys", _path),
    "ZSTRAT_TRANSPORT": ("transport", _one_of(*TRANSPORTS)),
    "ZSTRAT_LOG": ("log_json", _is("json", "", "text")),
    "ZSTRAT_OUTPUT": ("output", _one_of(*OUTPUTS)),
    "ZSTRAT_PREFETCH": ("prefetch", _prefetch),
    "ZSTRAT_SPILL": ("spill", _path),
    "ZSTRAT_STATE": ("state", _path),
    "ZSTRAT_TRACEBACK": ("traceback", _one_of("short", "full")),
}
"""Environment variable -> the field of `Settings` that it sets and the function that
converts its value."""

NAMES: Final = (*_DURATIONS, *_OTHERS)
