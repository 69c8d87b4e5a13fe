"""``python -m zstrat.daemons.launched ps|worker``: a daemon that a fleet starts, here
or on another machine, and talks to over the standard streams.

The conversation is one JSON object a line. First the daemon writes its versions. If
they match, the fleet answers with the keys and environment variables of the task. Then
the daemon writes the address at which it serves. Logs go to standard error.

Law: keys arrive on standard input, never on a command line; they are stored in a folder
that only this user can read, until the daemon has read them. The daemon never outlives
its launcher: it drains when standard input closes or has brought no heartbeat (an empty
line) for ``--launcher-timeout`` seconds, and is killed when its parent process ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from zstrat.cluster import take_part
from zstrat.launch import kept_for_good
from zstrat.launch.fleet import share, write_keys
from zstrat.signals import handle
from zstrat.transport import hello, new_incarnation

from . import ps, worker

if TYPE_CHECKING:
    from collections.abc import Sequence

MAINS: Final = {"ps": ps.main, "worker": worker.main}
_IN_MEMORY: Final = Path("/dev/shm")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a daemon of a fleet; ends the process with the exit codes of the daemon."""
    job, *arguments = sys.argv[1:] if argv is None else argv
    # Before the import of jax, which takes seconds: if the parent ends meanwhile,
    # another process is in its place.
    parent = os.getppid()
    # The conversation gets its own descriptor, and everything else that is printed goes
    # to the log: an import that prints a line would be taken for an answer.
    report = os.dup(1)
    os.dup2(2, 1)
    me = hello(job, 0, new_incarnation())
    greeting = {"protocol": me.protocol, "host": me.host, "versions": me.versions}
    os.write(report, json.dumps(greeting).encode() + b"\n")
    timeout = float(arguments[arguments.index("--launcher-timeout") + 1])
    received = _receive_setup(timeout)
    os.environ.update(received["env"])
    # Python read PYTHONPATH when it started, before this process received it.
    paths = received["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path]
    # As the workers of a `LocalCluster` do; a ps uses one core and no GPU.
    if job == "worker":
        host = received["host"]
        # Before the import of jax, which reads both.
        _take_share(int(host["rank"]), int(host["tasks"]))
        # Before the keys are written: a daemon that is killed in these seconds, because
        # another task has failed, leaves none.
        with kept_for_good():
            from zstrat.worker import WorkerService  # noqa: F401
    arguments += ["--parent", str(parent), "--report", str(report)]
    if not received["keys"]:
        MAINS[job](arguments)
        return
    # In memory, so that no disk keeps what was deleted.
    memory = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="zstrat-keys-", dir=memory))
    try:
        write_keys(folder / "keys", received["keys"])
        arguments += ["--keys", str(folder / "keys"), "--remove-keys", str(folder)]
        MAINS[job](arguments)
    finally:
        # The daemon removes them once it has read them, but may not come so far: an
        # invalid setting ends it before.
        shutil.rmtree(folder, ignore_errors=True)


def _take_share(index: int, workers: int) -> None:
    """Limits this worker to its share of the cores and GPUs of the host. ``index`` is
    the worker's number among the ``workers`` on this host."""
    os.environ.setdefault("NPROC", str(share(workers)))
    try:
        gpus = take_part(index, workers)
    except RuntimeError as error:
        print(f"zstrat-worker: {error}", file=sys.stderr)
        sys.exit(2)
    if gpus:
        words = f"worker {index} of {workers} on this host uses"
        print(f"{words} GPU {', '.join(gpus)}", file=sys.stderr)


def _receive_setup(timeout: float) -> dict[str, dict[str, str]]:
    """Reads the keys and variables of the task from standard input. If the versions do
    not match, the fleet closes that stream instead."""
    # A timer of the kernel, as `readline` has no timeout, and no loop runs yet: a
    # daemon whose connection hangs at this point would stay without end.
    late = f"sent no task description within {timeout:g} s"
    handle(signal.SIGALRM, lambda number, frame: _exit(late))
    signal.setitimer(signal.ITIMER_REAL, timeout)
    line = sys.stdin.buffer.readline()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if not line:
        _exit("rejected this daemon; its own error says why")
    setup: dict[str, dict[str, str]] = json.loads(line)
    return setup


def _exit(why: str) -> NoReturn:
    print(f"the launching program {why}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
