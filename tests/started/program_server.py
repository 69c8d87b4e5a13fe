"""``python -m program_server FD``: the process that programs of tests are forked from
(`programs.py` has the other side).

To start Python and to import what they need takes a program a second and a half of the
processor, most of what many of them take at all. It has happened here, once for all."""

import builtins
import gc
import importlib
import os
import runpy
import socket
import sys
from pathlib import Path

import lowering

IMPORTED = (
    "jax.numpy",
    "optax",
    "zstrat",
    "zstrat.collectives",
    "zstrat.launch",
    "zstrat.program",
    "zstrat.saving",
    "zstrat.strategy",
    "zstrat.testing",
    "zstrat.worker",
)
"""None of them starts a thread or a backend of jax as it is imported."""


def code(descriptor):
    """Returns in each program with what it runs; ends the server with the tests."""
    # Not what pytest would import: the names of the fork server of zstrat itself.
    forks = importlib.import_module("zstrat.daemons.fork_server").ForkLoop
    for name in IMPORTED:
        importlib.import_module(name)
    lowering.share_contexts()
    gc.collect()
    gc.freeze()
    order = forks(socket.socket(fileno=descriptor)).run()
    if order is None:
        sys.exit()
    _take_place(order)
    return _program(order.arguments)


def _take_place(order):
    """Makes this process what the program would be if it were started."""
    if order.job == "session":
        os.setsid()
    os.fchdir(order.folder)
    for number, each in enumerate((order.stdin, order.output, order.report)):
        os.dup2(each, number)
    for each in {order.stdin, order.output, order.report, order.status, order.folder}:
        os.close(each)
    _tell_jax(os.environ, order.environment)
    paths = order.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    os.environ.clear()
    os.environ.update(order.environment)


def _tell_jax(before, now):
    """It has read the environment as it was imported."""
    config = sys.modules["jax"].config
    names = {name for name in {*before, *now} if name.startswith("JAX_")}
    for name in sorted(names):
        text = now.get(name)
        if text == before.get(name):
            continue
        match getattr(config, name.lower()):
            case bool():
                value = text.lower() in ("1", "true")
            case int():
                value = int(text)
            case _:
                value = text
        config.update(name.lower(), value)


def _program(arguments):
    """What ``python ARGUMENTS`` runs, and the names of `__main__` as it finds them."""
    sys.orig_argv = [sys.executable, *arguments]
    names = sys.modules["__main__"].__dict__
    names.clear()
    names.update(__name__="__main__", __builtins__=builtins)
    names.update(dict.fromkeys(("__doc__", "__package__", "__spec__", "__loader__")))
    match arguments:
        case ["-c", text, *_]:
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, "")
            return compile(text, "<string>", "exec")
        case ["-m", module, *_]:
            sys.argv = ["-m", *arguments[2:]]
            sys.path.insert(0, str(Path.cwd()))
            names.update(runpy=runpy, module=module)
            if not hasattr(sys.modules.get(module), "__path__"):
                sys.modules.pop(module, None)  # else runpy warns of it
            text = "runpy.run_module(module, run_name='__main__', alter_sys=True)"
            return compile(text, "<string>", "exec")
        case [script, *_]:
            sys.argv = arguments
            sys.path.insert(0, str(Path(script).resolve().parent))
            names.update(__file__=script)
            return compile(Path(script).read_bytes(), script, "exec")
    raise ValueError(f"no program: {arguments}")


if __name__ == "__main__":
    sys.path.pop(0)  # the folder that the tests run in
    exec(importlib.import_module("program_server").code(int(sys.argv[1])))
