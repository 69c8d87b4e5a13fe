"""Every number and every setting from outside: the only reader of `os.environ`.

What ``ZSTRAT_*`` and a TOML file say becomes `Settings` here, frozen values that are
handed down from the top. What other systems set for the processes that they start
(``TF_CONFIG``, ``SLURM_*``) is read by whoever understands it, at `environment`.
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
"""Seconds that the closing of a task may take beyond its drain."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Durations in seconds."""

    beat: float = 0.5
    """A peer that was sent nothing for so long is sent a Beat."""
    liveness: float = 5.0
    """A peer that was silent for so long is lost. Ten beats: a loaded machine may delay
    some of them, and a false loss costs a retry of all that was in flight."""
    reconnect: float = 1.0
    """A connection that broke has so long to come back before the peer is lost."""
    handshake: float = 5.0
    connect: float = 60.0
    """How long a program waits for the tasks of its cluster when it starts."""
    turn: float = 0.0
    """How long a program waits while another one, which is alive, holds its cluster."""
    resolve: float = 10.0
    """So long after its last answer a resolver whose answer may change is asked again;
    sooner when a worker was lost. One small question to a busy service, or one file."""
    request: float = 120.0
    """Deadline of a request that was given none: longer than the longest compile. It
    is put off by as much whenever part of a large body arrives."""
    drain: float = 10.0
    """What was accepted has so long to finish after SIGTERM."""
    handover: float = 60.0
    """A parameter server with a state folder that is told to stop has so long to write
    what it holds; who uses it then waits as long for the process that goes on."""
    launcher: float = 300.0
    """A daemon that a program has started on another machine ends if it has heard
    nothing of that program for so long. Longer than a person stops a program for."""

    @property
    def notice(self) -> float:
        """How long it takes to miss a program that has ended in whatever way, or was
        cut off: who holds a cluster and is not heard is given so long."""
        return self.liveness + self.reconnect


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds, each with the reason for its number; in bytes unless the name says."""

    header: int = 256 * 1024
    """Real headers are below 2 KiB, but for the creation of thousands of variables."""
    frames: int = 4096
    """Buffer frames of one message; more arrays than this travel as a body in chunks,
    and how many those may be the header bounds."""
    frame: int = 4 * MiB
    """Largest frame: libzmq drops the connection of a peer that sends a larger one."""
    chunk: int = MiB
    """A larger body travels in frames of this size: the allocator serves them from
    pages that it has touched before, three times faster than one large frame."""
    window: int = 12
    """Chunks of one stream in flight: enough to keep both ends busy, few enough that
    they stay in the cache and that a slow reader costs its sender little memory."""
    body: int = 64 * 1024 * MiB
    """Largest announced body of one message."""
    streams: int = 256
    """Bodies that one peer may have under way to us at a time."""
    requests: int = 16384
    """Requests of one peer that may be open at a time."""
    unread: int = 16 * MiB
    """Answers that wait for a peer to read them. Above it what the peer sends waits,
    too, up to as much again: more than a window of chunks, and little beside what a
    parameter server holds anyway."""
    inline: int = 64 * 1024
    """Results up to this size travel with the completion of their closure."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a task is told from outside, once."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    transport: str = "auto"
    prefetch: int = 0
    """Optimizer steps whose values and rows a worker fetches while one computes. Each
    makes gradients older by as many updates as there are workers."""
    keys: Path | None = None
    insecure: bool = False
    log_json: bool = False
    traceback: str = "short"
    """Errors of public calls come without the frames of zstrat; "full": with them."""
    output: str = "program"
    """What workers print is shown by the program, too; "files": is in their logs alone,
    of all programs if a worker says so."""
    http: str = ""
    """Where this process says over HTTP how it is, HOST:PORT; "": nowhere."""
    http_token: str = field(default="", repr=False)
    """What its page is shown for to other machines; "": it is not."""
    state: Path | None = None
    """A folder where a parameter server that is told to stop leaves what it holds for
    the process that goes on. None: it is lost with the process."""
    choices: Path | None = None
    """A table of algorithms for collectives, as ``zstrat bench collectives`` writes
    it. None: what experience says."""


TRANSPORTS: Final = ("auto", "tcp", "ipc", "shm")
OUTPUTS: Final = ("program", "files")

MISTAKEN: Final = 2
"""Exit code of a process that was told what cannot be: a second try would not help."""
TRY_AGAIN: Final = 75
"""Exit code (EX_TEMPFAIL) of a process that ended before all was done, and wants to be
started again: nothing is wrong."""


def checked_transport(transport: str) -> str:
    """The transport that a caller gave.

    Raises:
        ValueError: There is none of that name.
    """
    if transport not in TRANSPORTS:
        raise ValueError(
            f"transport={transport!r}: expected one of {', '.join(TRANSPORTS)}"
        )
    return transport


def environment() -> Mapping[str, str]:
    """The process environment, read at each call."""
    return os.environ


def set_environment(name: str, value: str) -> None:
    """Set a variable of this process, for libraries that are told by it alone."""
    os.environ[name] = value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about a name that is not known: the closest of the known
    ones, or "" where none is close."""
    meant = get_close_matches(name, list(known), n=1)
    return f"; did you mean {meant[0]!r}?" if meant else ""


def settings_from(env: Mapping[str, str]) -> Settings:
    """Settings of this process from ``ZSTRAT_*``.

    Raises:
        ValueError: A variable has a value that it cannot have; says which ones it can.
            Or it is none of ours, and its name is all but that of one.
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
    """What a program tells of its settings to the daemons that it starts, as
    `settings_from` reads it there.

    Raises:
        ValueError: They would refuse it.
    """
    told = {
        name: str(getattr(settings.timeouts, _DURATIONS[name]))
        for name in _DURATIONS_OF_DAEMONS
    }
    if settings.state is not None:
        told["ZSTRAT_STATE"] = str(settings.state)
    settings_from(told)  # what a daemon would refuse is the program's mistake
    return told


def read_toml(path: str | os.PathLike[str]) -> dict[str, object]:
    """A TOML file as plain data.

    Raises:
        ValueError: The file is missing or is no TOML; names the file and the place.
    """
    import tomllib  # few processes read a file, and all of them import this module

    try:
        # Editors of Windows put a byte order mark before the text.
        return tomllib.loads(Path(path).read_text("utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no valid TOML: {error}") from error


def _check_names(env: Mapping[str, str]) -> None:
    """Refuses a slip of the pen. Other names are somebody else's: Kubernetes, say, sets
    ZSTRAT_PS_PORT where a service is called zstrat-ps."""
    for name in env:
        if name.startswith("ZSTRAT_") and name not in NAMES:
            for meant in get_close_matches(name, NAMES, n=1, cutoff=0.9):
                raise ValueError(f"{name} is no setting of zstrat: is {meant} meant?")


Read = Callable[[str, str], Any]
"""Makes a setting of the name of its variable, for errors, and of what that says."""


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 86400:
        raise ValueError(f"{name}={text!r}: expected seconds, above 0 and below a day")
    least = 2 * _BEAT if name == "ZSTRAT_LIVENESS" else 0.0
    if value < least:
        raise ValueError(
            f"{name}={text!r}: expected {least:g} seconds or more: peers that are well "
            f"say so every {_BEAT:g} s at most"
        )
    return value


def _prefetch(name: str, text: str) -> int:
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
    """Whether the word is said, or one of the others."""
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
"""The field of `Timeouts` that each variable sets."""

_DURATIONS_OF_DAEMONS: Final = (
    "ZSTRAT_CONNECT_TIMEOUT",
    "ZSTRAT_DRAIN",
    "ZSTRAT_HANDOVER",
    "ZSTRAT_LIVENESS",
    "ZSTRAT_REQUEST",
)
"""Those that tasks have to agree on with their program, or obey for it."""

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
    "ZSTRAT_STATE": ("state", _path),
    "ZSTRAT_TRACEBACK": ("traceback", _one_of("short", "full")),
}
"""The field of `Settings` that each other variable sets, and how it is read."""

NAMES: Final = (*_DURATIONS, *_OTHERS)
