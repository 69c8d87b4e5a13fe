"""The folder of what ``zstrat up`` runs: who holds it, and which names in it are ours.

Nothing else in it is ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

_OURS: Final = re.compile(r"lock|cluster\.toml|up\.log|(ps|worker)-[0-9]+\.log")
_KEYS: Final = re.compile(r"[a-z]+\.(secret|public)")


def folder_of(hosts: Path) -> Path:
    """``hosts.toml`` has ``hosts.up``.

    Raises:
        ValueError: That cannot be a folder.
    """
    folder = hosts.absolute().with_suffix(".up")
    if hosts.suffix == ".up" or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder} would be the folder of what runs, and is a file: rename it"
        )
    return folder


@contextlib.contextmanager
def held(folder: Path, queue: float = 0.0) -> Iterator[Path]:
    """The folder, locked; old logs are gone. What is left at the end is kept.

    Args:
        queue: Seconds to wait while another process holds it. On the main thread.

    Raises:
        ValueError: Another process holds it, or there are files of somebody else.
    """
    with contextlib.ExitStack() as stack:
        with _patience(folder, queue):
            lock = stack.enter_context(_locked(folder, waits=queue > 0))
        if lock is None:
            raise ValueError(
                f"{_holder_words(folder)}: end it with `zstrat down`, or wait for it "
                "with --queue"
            )
        try:
            if lock.read():  # of one that was killed
                clear(folder, keys=True)
            _refuse_strangers(folder)
            clear(folder)
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield folder
        finally:
            (folder / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there are logs to be read
                folder.rmdir()


def clear(folder: Path, *, keys: bool = False) -> None:
    """Removes what is ours but the lock, and keys of a run that was killed."""
    for file in folder.iterdir():
        if _OURS.fullmatch(file.name) and file.name != "lock":
            file.unlink()
    if keys and (folder / "keys").is_dir():
        for file in (folder / "keys").iterdir():
            if _KEYS.fullmatch(file.name):
                file.unlink()
        with contextlib.suppress(OSError):  # something else is in it
            (folder / "keys").rmdir()


@contextlib.contextmanager
def _locked(folder: Path, *, waits: bool) -> Iterator[IO[str] | None]:
    """The lock, at its begin; None: another process holds it, and is not waited for.

    Who held it before removes it, and the folder: then it is another file by now.
    """
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context((folder / "lock").open("a+"))
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waits:
                    yield None
                    return
                click.echo(f"zstrat: waits, as {_holder_words(folder)}", err=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_same(folder / "lock", lock):
                continue
            lock.seek(0)
            yield lock
            return


@contextlib.contextmanager
def _patience(folder: Path, seconds: float) -> Iterator[None]:
    """Ends what is in it by a ValueError when so many seconds have passed; 0: none."""

    def late(number: int, frame: object) -> NoReturn:
        raise ValueError(f"{_holder_words(folder)}, for {seconds:g} s by now (--queue)")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def ended(folder: Path, number: int) -> bool:
    """Has who holds the folder end, by this signal, and waits; false: nobody does.

    Raises:
        ValueError: Who holds it has not yet said who it is.
    """
    try:
        with (folder / "lock").open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = _holder(folder, lock)
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)
                # Its own end has deadlines: it drains, and kills who is late.
                fcntl.flock(lock, fcntl.LOCK_EX)
                return True
            if _is_same(folder / "lock", lock):  # of one that was killed
                clear(folder, keys=True)
                (folder / "lock").unlink()
                with contextlib.suppress(OSError):  # somebody else's files
                    folder.rmdir()
    except FileNotFoundError:
        pass
    return False


def _is_same(file: Path, lock: IO[str]) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


def _holder(folder: Path, lock: IO[str]) -> int:
    """Who holds the lock. A number from before, of one that was killed, may be of any
    process by now: it counts only if that one has the file open, where one can see."""
    said = lock.read()
    if said.isdecimal() and (not Path("/proc/self/fd").exists() or _has(said, lock)):
        return int(said)
    raise ValueError(f"{folder} is held by one that has just begun: try again")


def _holder_words(folder: Path) -> str:
    said = ""
    with contextlib.suppress(OSError):  # it ends just now
        said = (folder / "lock").read_text()
    who = f" (pid {said})" if said.isdecimal() else ""
    return f"{folder} is held by another `zstrat up`{who}"


def _has(pid: str, lock: IO[str]) -> bool:
    with contextlib.suppress(OSError):  # it is gone, or not ours
        for file in Path("/proc", pid, "fd").iterdir():
            if _is_same(file, lock):
                return True
    return False


def _refuse_strangers(folder: Path) -> None:
    names = sorted(file.name for file in folder.iterdir())
    strange = [n for n in names if n != "keys" and not _OURS.fullmatch(n)]
    if strange:
        raise ValueError(
            f"{folder} is for what `zstrat up` runs, and has {', '.join(strange)}: "
            "move that elsewhere"
        )
