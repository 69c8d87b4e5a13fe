"""``zstrat up`` and ``zstrat down``: a cluster on hosts that ssh reaches.

What runs is known by a folder beside the file of hosts: ``hosts.toml`` has
``hosts.up``, with the keys, the cluster file, the logs, and a lock that is held as long
as the tasks are. Who holds it ends them. Law of that folder: nothing in it is removed
but names that are ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from zstrat.errors import ZstratError
from zstrat.launch import run_beside, ssh
from zstrat.signals import handle

from ._cluster import how_to_connect, toml
from ._options import QueueingCommand, fail, failures, settings
from ._signals import as_interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

    from zstrat.launch import Fleet


_IS_UP: Final = "all tasks serve"
_HOSTS: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=QueueingCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--ps", type=click.IntRange(1), help="parameter servers; default: as HOSTS says"
)
@click.option(
    "--workers", type=click.IntRange(0), help="workers; default: as HOSTS says"
)
@click.option(
    "-d", "--detach", is_flag=True, help="return when all serve; `zstrat down` ends it"
)
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=0,
    metavar="[SECONDS]",
    help="wait while another `zstrat up` holds the hosts of the file",
)
@click.option("--alone", is_flag=True, hidden=True, help="nobody watches: say it once")
@click.argument("hosts", type=_HOSTS)
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def up(
    ps: int | None,
    workers: int | None,
    detach: bool,
    queue: int,
    alone: bool,
    hosts: Path,
    program: tuple[str, ...],
) -> None:
    """Run daemons on the hosts of a file, by ssh. Ctrl-C, or `zstrat down`, ends them.

    With a PROGRAM, such as `python train.py`, it is run here when all serve: it finds
    them in TF_CONFIG and ZSTRAT_KEYS, its end ends them, and its exit code is ours.
    """
    if detach and program:
        raise click.UsageError("--detach and a program: expected one of them")
    if program and program[0].startswith("-"):
        raise click.UsageError(f"{program[0]}: options are written before HOSTS")
    if program:
        with failures():
            _require_program(program)
    if detach:
        counts = (("--ps", ps), ("--workers", workers), ("--queue", queue))
        said = [f"{name}={count}" for name, count in counts if count is not None]
        sys.exit(_detached([*said, str(hosts)]))
    try:
        with held(folder_of(hosts), queue) as folder:
            code = _up(hosts, ps, workers, folder, program, alone=alone)
    except KeyboardInterrupt as signalled:
        click.echo("interrupted; all tasks ended")
        code = _code(signalled) if program else 0  # nobody ran it
    except (ZstratError, ValueError, OSError) as error:
        fail(error)
    sys.exit(code)


def _require_program(program: Sequence[str]) -> None:
    """Looks before anything is started.

    Raises:
        ValueError: There is no such program, or no such script for Python.
    """
    if shutil.which(program[0]) is None:
        advice = ""
        if Path(program[0]).is_file():
            advice = f": it is not executable; give `python {program[0]}`?"
        raise ValueError(
            f"there is no program {program[0]!r} here that can be run{advice}"
        )
    if len(program) > 1 and Path(program[0]).name.startswith("python"):
        script = program[1]
        if script.endswith(".py") and not Path(script).exists():
            raise ValueError(f"program {script!r} does not exist")


@click.command()
@click.argument("hosts", type=_HOSTS)
def down(hosts: Path) -> None:
    """End what `zstrat up` runs for this file. Returns when all tasks have ended."""
    with failures():
        has_run = ended(folder_of(hosts), signal.SIGTERM)
    click.echo("all tasks ended" if has_run else f"nothing runs for {hosts}")


def _up(
    hosts: Path,
    ps: int | None,
    workers: int | None,
    folder: Path,
    program: Sequence[str],
    *,
    alone: bool,
) -> int:
    try:
        with as_interrupts():
            fleet = ssh(hosts, ps, workers, directory=folder, settings=settings(None))
    except KeyboardInterrupt:  # no task has failed: there is nothing to be read
        clear(folder)
        raise
    with _cleared(fleet, folder):
        if program:
            return run_beside(fleet, program)
        with as_interrupts():
            file = folder / "cluster.toml"
            file.write_text(toml(fleet.spec), "utf-8")
            click.echo(_words(fleet, file))
            if alone:
                _leave_terminal(folder / "up.log")
            fleet.wait()
            click.echo("all tasks ended by themselves", err=True)
            return 1


@contextlib.contextmanager
def _cleared(fleet: Fleet, folder: Path) -> Iterator[None]:
    """Ends the fleet. No folder is left, unless logs there say of failures."""
    try:
        with fleet:
            yield
    finally:
        if not fleet.failures:
            clear(folder)


def _words(fleet: Fleet, file: Path) -> str:
    connect, keys = how_to_connect(fleet.spec, file), shlex.quote(str(fleet.keys))
    return f"{connect}  export ZSTRAT_KEYS={keys}\n\n{_IS_UP}"


def _code(signalled: KeyboardInterrupt) -> int:
    """The exit code of a program that a signal has ended, as shells say it."""
    return 128 + (signalled.args[0] if signalled.args else signal.SIGINT)


def _leave_terminal(log: Path) -> None:
    """Sends what is said from now on to the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _detached(arguments: Sequence[str]) -> int:
    """Has another process of our own do it; 0 when all tasks serve, else its code. A
    signal ends that one, too."""
    with as_interrupts():
        process = _started(arguments)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                click.echo(line, nl=False)
                if line.strip() == _IS_UP:
                    return 0
        except KeyboardInterrupt as signalled:
            process.terminate()
            click.echo(process.communicate()[0], nl=False)
            return _code(signalled)
        return process.wait() or 1


def _started(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "zstrat.cli", "up", "--alone", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


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
        with _time_limit(folder, queue):
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
def _time_limit(folder: Path, seconds: float) -> Iterator[None]:
    """Ends what is in it by a ValueError when so many seconds have passed; 0: none."""

    def late(number: int, frame: object) -> NoReturn:
        raise ValueError(f"{_holder_words(folder)}, for {seconds:g} s by now (--queue)")

    before = handle(signal.SIGALRM, late)
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
    raise ValueError(
        f"{folder} is held by a `zstrat up` that has just begun: try again"
    )


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
