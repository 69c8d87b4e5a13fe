"""``python -m zstrat.daemons.launched ps|worker``: a daemon that a fleet has started,
maybe on another machine, and that hears of it through its standard streams alone.

What is said, one JSON object a line: the daemon its versions, before anything else; the
fleet the keys and variables of the task, if the versions are the same; the daemon the
address at which it serves. What is printed goes to standard error, which is the log.

Law: keys come by standard input, never on a command line, and lie in a folder of this
user alone for the moment in which they are read. The daemon never outlives who started
it: it drains when standard input ends, or has been silent for ``--launcher-timeout``
seconds, for which an empty line now and then will do; and is killed when its parent
process ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from zstrat.cluster import take_part
from zstrat.launch.fleet import share, write_keys
from zstrat.signals import handle
from zstrat.transport import hello, new_incarnation

from . import ps, worker

if TYPE_CHECKING:
    from collections.abc import Sequence

MAINS: Final = {"ps": ps.main, "worker": worker.main}
_IN_MEMORY: Final = Path("/dev/shm")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process with the exit codes of the daemon."""
    job, *arguments = sys.argv[1:] if argv is None else argv
    report = os.dup(1)
    os.dup2(2, 1)
    mine = hello(job, 0, new_incarnation())
    greeting = {"protocol": mine.protocol, "host": mine.host, "versions": mine.versions}
    os.write(report, json.dumps(greeting).encode() + b"\n")
    told = _told(float(arguments[arguments.index("--launcher-timeout") + 1]))
    os.environ.update(told["env"])
    # As beside other workers of a `LocalCluster`; a ps takes one core and no GPU.
    if job == "worker":
        _divide(int(told["beside"]["place"]), int(told["beside"]["count"]))
    # Python has read it when it started.
    paths = told["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path]
    arguments += ["--parent", str(os.getppid()), "--report", str(report)]
    if told["keys"]:
        place = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
        passing = Path(tempfile.mkdtemp(prefix="zstrat-keys-", dir=place))
        write_keys(passing / "keys", told["keys"])
        arguments += ["--keys", str(passing / "keys"), "--passing", str(passing)]
    MAINS[job](arguments)


def _divide(place: int, workers: int) -> None:
    """Takes this worker's part of what the workers of this host share."""
    os.environ.setdefault("NPROC", str(share(workers)))
    try:
        gpus = take_part(place, workers)
    except RuntimeError as error:
        print(f"zstrat-worker: {error}", file=sys.stderr)
        sys.exit(2)
    if gpus:
        words = f"worker {place} of the {workers} on this host has"
        print(f"{words} GPU {', '.join(gpus)}", file=sys.stderr)


def _told(timeout: float) -> dict[str, dict[str, str]]:
    """What the fleet says. It says nothing to a daemon that does not suit it."""
    late = f"did not say within {timeout:g} s what it is to do"
    handle(signal.SIGALRM, lambda number, frame: _leave(late))
    signal.setitimer(signal.ITIMER_REAL, timeout)
    line = sys.stdin.buffer.readline()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if not line:
        _leave("does not want it")
    found: dict[str, dict[str, str]] = json.loads(line)
    return found


def _leave(why: str) -> NoReturn:
    print(f"the program that started this daemon {why}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
