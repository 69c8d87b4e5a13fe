"""A program of the user beside a fleet: it finds the tasks and the keys in its
environment, gets the signals that we get, and the fleet ends with it."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING, Final

from zstrat.launch._child import inherited, shell_code
from zstrat.launch._copies import WATCHING_PARENT
from zstrat.signals import handle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._fleet import Fleet

FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""A terminal sends Ctrl-C to both of us itself."""


def run_beside(fleet: Fleet, command: Sequence[str]) -> int:
    """Runs a program until it ends; its exit code, or 128 and the number of its signal.

    Called on the main thread. Standard streams are ours.

    Raises:
        OSError: It cannot be started.
    """
    config = {"cluster": fleet.spec.as_dict()}  # the program is none of the tasks
    env = {
        **inherited(),
        "TF_CONFIG": json.dumps(config),
        "ZSTRAT_KEYS": str(fleet.keys),
    }
    # It may be on the host of a worker, which would find its GPU full.
    env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    heard: list[int] = []
    before = {each: signal.getsignal(each) for each in (*FORWARDED, signal.SIGINT)}
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: object) -> None:
        heard.append(number)
        if process is not None:
            process.send_signal(number)

    try:
        for each in FORWARDED:
            if before[each] is not signal.SIG_IGN:
                handle(each, forward)
        handle(signal.SIGINT, lambda number, frame: None)
        process = subprocess.Popen([*WATCHING_PARENT, *command], env=env)
        for number in tuple(heard):  # that came while it was started
            process.send_signal(number)
        code = process.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return shell_code(code)
