"""``zstrat up`` and ``zstrat down``: start and stop a cluster on hosts over ssh.

The state of ``hosts.toml`` is in the folder ``hosts.up`` next to it: the keys, the
cluster file, the logs, and a lock that ``zstrat up`` holds as long as the tasks run.
Law: in that folder only files with names that zstrat uses are removed.
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
from zstrat.launch import run_with_cluster, ssh
from zstrat.signals import handle

from ._cluster import how_to_connect, toml
from ._options import (
    QueueingCommand,
    as_interrupts,
    count_option,
    exit_code_of,
    fail,
    failures,
    settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

    from zstrat.launch import Fleet


_READY: Final = "all tasks are ready"
_HOSTS: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(cls=QueueingCommand, context_settings={"allow_interspersed_args": False})
@count_option("--ps", default=None, help="parameter servers; default: ps in HOSTS")
@count_option(
    "--workers", least=0, default=None, help="workers; default: workers in HOSTS"
)
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="return when all tasks are ready; stop them with `zstrat down`",
)
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=0,
    metavar="[SECONDS]",
    help="wait while another `zstrat up` runs for HOSTS",
)
@click.option("--alone", is_flag=True, hidden=True, help="log to a file once ready")
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
    """Run daemons over ssh on the hosts in the TOML file HOSTS. Ctrl-C or `zstrat down`
    stops them.

    If PROGRAM is given, such as `python train.py`, it is run on this machine when all
    tasks are ready, with the cluster in TF_CONFIG and ZSTRAT_KEYS. The tasks stop when
    it ends, and its exit code is returned.
    """
    if detach and program:
        raise click.UsageError("--detach cannot be combined with a program")
    if program and program[0].startswith("-"):
        raise click.UsageError(f"{program[0]}: options must come before HOSTS")
    # A wrong path costs nothing here, and a start of the whole fleet later.
    if program:
        with failures():
            _require_program(program)
    if detach:
        counts = (("--ps", ps), ("--workers", workers), ("--queue", queue))
        options = [f"{name}={count}" for name, count in counts if count is not None]
        # The other process locks the folder: a lock does not survive its process.
        sys.exit(_detach([*options, str(hosts)]))
    try:
        with locked_folder(folder_of(hosts), queue) as folder:
            code = _up(hosts, ps, workers, folder, program, alone=alone)
    except KeyboardInterrupt as interrupt:
        click.echo("interrupted; all tasks stopped")
        # Without a program: a normal end.
        code = exit_code_of(interrupt) if program else 0
    except (ZstratError, ValueError, OSError) as error:
        fail(error)
    sys.exit(code)


def _require_program(program: Sequence[str]) -> None:
    """Checks the program before any task is started.

    Raises:
        ValueError: The program, or the script for Python, does not exist.
    """
    if shutil.which(program[0]) is None:
        problem = "not found"
        if Path(program[0]).is_file():
            problem = f"is not executable; did you mean `python {program[0]}`?"
        raise ValueError(f"program {program[0]!r} {problem}")
    if len(program) > 1 and Path(program[0]).name.startswith("python"):
        script = program[1]
        if script.endswith(".py") and not Path(script).exists():
            raise ValueError(f"program {script!r} does not exist")


@click.command()
@click.argument("hosts", type=_HOSTS)
def down(hosts: Path) -> None:
    """Stop the tasks that `zstrat up` runs for HOSTS, and wait until they have
    ended."""
    with failures():
        has_run = stop(folder_of(hosts), signal.SIGTERM)
    click.echo("all tasks stopped" if has_run else f"no tasks are running for {hosts}")


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
    except KeyboardInterrupt:  # no task has failed: the logs are not needed
        clear(folder)
        raise
    with _stopped_at_end(fleet, folder):
        # Signals are the program's from here on; its end stops the tasks.
        if program:
            return run_with_cluster(fleet.spec, fleet.keys, program)
        with as_interrupts():
            file = folder / "cluster.toml"
            file.write_text(toml(fleet.spec), "utf-8")
            keys = shlex.quote(str(fleet.keys))
            click.echo(how_to_connect(fleet.spec, file), nl=False)
            click.echo(f"  export ZSTRAT_KEYS={keys}\n\n{_READY}")
            # After `_READY` the starter leaves, and with it the pipe for the output.
            if alone:
                _redirect_output(folder / "up.log")
            # Returns only if no task is left; the usual end is a signal.
            fleet.wait()
            click.echo("all tasks have failed or ended", err=True)
            return 1


@contextlib.contextmanager
def _stopped_at_end(fleet: Fleet, folder: Path) -> Iterator[None]:
    """Stops the tasks of the fleet after the block, and removes the logs unless a task
    failed."""
    try:
        with fleet:
            yield
    finally:
        if not fleet.failures:
            clear(folder)


def _redirect_output(log: Path) -> None:
    """Redirects standard output and standard error to the log file."""
    # By descriptor, for what native code and child processes print as well.
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _detach(arguments: Sequence[str]) -> int:
    """Runs ``zstrat up`` in another process; returns 0 when all tasks are ready, or its
    exit code if it fails. Until then a signal stops that process as well."""
    with as_interrupts():
        process = subprocess.Popen(
            [sys.executable, "-m", "zstrat.cli", "up", "--alone", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # It outlives this terminal, whose end sends SIGHUP to the session.
            start_new_session=True,
            text=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                click.echo(line, nl=False)
                if line.strip() == _READY:
                    return 0
        except KeyboardInterrupt as interrupt:
            process.terminate()
            click.echo(process.communicate()[0], nl=False)
            return exit_code_of(interrupt)
        # Its output ended without `_READY`, so even code 0 is a failure.
        return process.wait() or 1


_OURS: Final = re.compile(r"lock|cluster\.toml|up\.log|(ps|worker)-[0-9]+\.log")
_KEYS: Final = re.compile(r"[a-z]+\.(secret|public)")


def folder_of(hosts: Path) -> Path:
    """Returns the folder ``hosts.up`` for the file ``hosts.toml``.

    Raises:
        ValueError: The path of the folder is a file.
    """
    folder = hosts.absolute().with_suffix(".up")
    if hosts.suffix == ".up" or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder} is needed as a folder for keys and logs, but is a file: rename "
            "it"
        )
    return folder


@contextlib.contextmanager
def locked_folder(folder: Path, queue: float = 0.0) -> Iterator[Path]:
    """Locks the folder during the block and removes old logs. At the end, removes the
    lock, and the folder if it is empty.

    Args:
        queue: Seconds to wait while another process holds the lock. Needs the main
            thread.

    Raises:
        ValueError: Another process holds the lock, or the folder has foreign files.
    """
    with contextlib.ExitStack() as stack:
        # The limit is for the lock alone, not for the run.
        with _time_limit(folder, queue):
            lock = stack.enter_context(_locked(folder, waits=queue > 0))
        if lock is None:
            raise ValueError(
                f"{_held_message(folder)}: stop it with `zstrat down`, or wait for it "
                "with --queue"
            )
        try:
            # A process id: its process was killed, or it would have removed the file.
            # Its keys are nobody's.
            if lock.read():
                clear(folder, keys=True)
            _refuse_foreign_files(folder)
            clear(folder)
            # Written last: until then `stop` asks to try again.
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield folder
        finally:
            # While the lock is held; see `_locked`.
            (folder / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it still has logs
                folder.rmdir()


def clear(folder: Path, *, keys: bool = False) -> None:
    """Removes zstrat's files in the folder except the lock; the keys only if asked."""
    for file in folder.iterdir():
        if _OURS.fullmatch(file.name) and file.name != "lock":
            file.unlink()
    if keys and (folder / "keys").is_dir():
        for file in (folder / "keys").iterdir():
            if _KEYS.fullmatch(file.name):
                file.unlink()
        with contextlib.suppress(OSError):  # it has foreign files
            (folder / "keys").rmdir()


@contextlib.contextmanager
def _locked(folder: Path, *, waits: bool) -> Iterator[IO[str] | None]:
    """Yields the open lock file, locked; None if another process holds the lock and
    ``waits`` is false.

    The previous holder removes the file and the folder. So if the file was removed
    before the lock was acquired, this function tries again.
    """
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # The folder may be removed between the two lines.
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
                click.echo(f"zstrat: waiting: {_held_message(folder)}", err=True)
                # Blocks in the kernel, which wakes one waiter at once; SIGALRM ends it.
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_locked_file(folder / "lock", lock):
                continue
            lock.seek(0)
            yield lock
            return


@contextlib.contextmanager
def _time_limit(folder: Path, seconds: float) -> Iterator[None]:
    """Raises ValueError in the block after this many seconds; 0: no limit."""

    def late(number: int, frame: object) -> NoReturn:
        raise ValueError(
            f"{_held_message(folder)}, still after {seconds:g} s (--queue)"
        )

    # An alarm, as `flock` has no timeout. A handler that raises ends it.
    before = handle(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def stop(folder: Path, number: int) -> bool:
    """Sends a signal to the process that holds the lock, and waits until it has ended.
    Returns False if there is no such process.

    Raises:
        ValueError: That process has not written its id to the lock file yet.
    """
    try:
        with (folder / "lock").open("r+") as lock:
            # Only a process that holds the lock is alive; the id alone proves nothing.
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = _holder(folder, lock)
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)
                # Bounded: the process drains its tasks with a deadline, then kills.
                fcntl.flock(lock, fcntl.LOCK_EX)
                return True
            # We hold it: it was left by a process that was killed. If it is another
            # file by now, a new process has the folder.
            if _is_locked_file(folder / "lock", lock):
                clear(folder, keys=True)
                (folder / "lock").unlink()
                with contextlib.suppress(OSError):  # it has foreign files
                    folder.rmdir()
    except FileNotFoundError:
        pass
    return False


def _is_locked_file(file: Path, lock: IO[str]) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


def _holder(folder: Path, lock: IO[str]) -> int:
    """Reads the id of the process that holds the lock. The id of a process that was
    killed may have been reused: it is valid only if that process has the file open
    (checked where there is a /proc)."""
    pid = lock.read()
    if pid.isdecimal() and (not Path("/proc/self/fd").exists() or _has_open(pid, lock)):
        return int(pid)
    raise ValueError(
        f"{folder} is locked by a `zstrat up` that just started: try again"
    )


def _held_message(folder: Path) -> str:
    pid = ""
    with contextlib.suppress(OSError):  # the process has just ended
        pid = (folder / "lock").read_text()
    holder = f" (pid {pid})" if pid.isdecimal() else ""
    return f"{folder} is locked by another `zstrat up`{holder}"


def _has_open(pid: str, lock: IO[str]) -> bool:
    """Returns whether the process has opened the lock file."""
    with contextlib.suppress(OSError):  # it has ended, or is of another user
        for file in Path("/proc", pid, "fd").iterdir():
            if _is_locked_file(file, lock):
                return True
    return False


def _refuse_foreign_files(folder: Path) -> None:
    names = sorted(file.name for file in folder.iterdir())
    foreign = [n for n in names if n != "keys" and not _OURS.fullmatch(n)]
    if foreign:
        raise ValueError(
            f"{folder} belongs to `zstrat up`, but has other files: "
            f"{', '.join(foreign)}; move them elsewhere"
        )
