"""Programs that tests start, forked from a process that has imported what they need
(`started/program_server.py`): with the faces of `subprocess.Popen` and
`subprocess.run`, of `python` with these arguments.

A program finds the environment, the folder and the streams that it is given, and is the
`__main__` of a process of its own, with its own exit. Forked ones have Python's hash
seed in common; what is about that, about the start of Python, or about options of it
(``-W``) is started by `subprocess`. Whoever uses this asks for the fixture `programs`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from zstrat.launch import ForkServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL

_servers: list[ForkServer] = []
"""That of this session of pytest, if it has one."""


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Has the server that programs are forked from."""
    _servers.append(ForkServer(os.environ, ["-m", "program_server"]))
    try:
        yield
    finally:
        _servers.clear()  # which ends it


class Program:
    """As `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = ".",
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        (server,) = _servers or [None]
        assert server is not None, "ask for the fixture `programs`"
        self.args = [*map(str, arguments)]
        with contextlib.ExitStack() as theirs:
            self.stdout, output = _stream(stdout, 1, text, theirs)
            if stderr == STDOUT:
                self.stderr, errors = None, output
            else:
                self.stderr, errors = _stream(stderr, 2, text, theirs)
            self._process = server.start(
                "session" if start_new_session else "program",
                self.args,
                {**(os.environ if env is None else env)},
                output=output,
                report=errors,
                folder=os.fspath(cwd),
            )
        pipe = self._process.stdin
        assert pipe is not None
        self.stdin: Any = None
        if stdin == PIPE:
            self.stdin = os.fdopen(os.dup(pipe.fileno()), "w" if text else "wb")
        pipe.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()
        self.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(
        self, said: str | bytes | None = None, timeout: float | None = None
    ) -> tuple[Any, Any]:
        """Says that, hears all that it says, and waits for its end.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time, and goes on.
        """
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                if said:
                    self.stdin.write(said)
                self.stdin.close()
        found: list[Any] = [None, None]

        def read(number: int, stream: Any) -> None:
            found[number] = stream.read()

        readers = [
            threading.Thread(target=read, args=(number, stream), daemon=True)
            for number, stream in enumerate((self.stdout, self.stderr))
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():  # one that it has started holds the stream
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self._close()
        return found[0], found[1]

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _stream(
    asked: Any, usual: int, text: bool, theirs: contextlib.ExitStack
) -> tuple[Any, int]:
    """Our end of a stream, if it is a pipe, and theirs."""
    if asked == PIPE:
        reading, writing = os.pipe()
        theirs.callback(os.close, writing)
        return os.fdopen(reading, "r" if text else "rb"), writing
    if asked == DEVNULL:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        theirs.callback(os.close, nowhere)
        return None, nowhere
    if asked is None:
        return None, usual
    return None, asked if isinstance(asked, int) else asked.fileno()


def run(
    arguments: Sequence[str | Path],
    *,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    process = Program(arguments, **options)
    try:
        out, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    code = process.returncode
    assert code is not None
    if check and code:
        raise subprocess.CalledProcessError(code, process.args, out, errors)
    return subprocess.CompletedProcess(process.args, code, out, errors)
