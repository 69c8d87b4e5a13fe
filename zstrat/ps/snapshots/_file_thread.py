"""Files as a parameter server knows them: on one thread of their own, blamed by name.

The coordinator names the files, and may be on another machine: so paths are absolute,
a file that exists is never written, and an error says on which server it happened.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from zstrat.checkpoint import TensorInfo, TensorWriter
from zstrat.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    import numpy as np

    from zstrat.ps._thread import JobThread

    T = TypeVar("T")


class DiskThread:
    """The thread that touches files. ``task`` names the server in errors."""

    def __init__(self, thread: JobThread, task: str) -> None:
        self._thread, self._task = thread, task

    def submit(self, job: Callable[[], None]) -> asyncio.Future[None]:
        """Queues a job; jobs run in order."""
        return self._thread.submit(job)

    async def run(self, job: Callable[[], T]) -> T:
        """The outcome of a job. Cancellation: it runs all the same."""
        outcome: list[T] = []
        await self._thread.submit(lambda: outcome.append(job()))
        return outcome[0]

    @contextlib.contextmanager
    def blamed(self, path: str, what: str) -> Iterator[None]:
        """What goes wrong with a file, as errors that name the server and the file.

        Raises:
            AlreadyExistsError, NotFoundError, ResourceExhaustedError: With this server.
            PermissionDeniedError: The user of this server may not touch the file.
            DataLossError: As it is.
            UnavailableError: Anything else that the system says.
        """
        try:
            yield
        except (AlreadyExistsError, NotFoundError, ResourceExhaustedError) as error:
            raise type(error)(f"{self._task}: {error}") from None
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError(
                f"{self._task}: {what} {path}: {error.strerror}"
            ) from None
        except PermissionError as error:
            raise PermissionDeniedError(
                f"{self._task}: {what} {path}: {error.strerror}: the user that the "
                "server runs as needs to be allowed to"
            ) from None
        except OSError as error:
            raise UnavailableError(
                f"{self._task}: {what} {path}: {error.strerror or error}"
            ) from None

    def require_absolute(self, path: str) -> None:
        """Refuses a relative path.

        Raises:
            InvalidArgumentError: Where that is depends on where the server was started.
        """
        if not os.path.isabs(path) or "\0" in path:
            raise InvalidArgumentError(
                f"{self._task}: {path!r} is no absolute path, and a relative one means "
                "something else on each server"
            )


class NewFile:
    """A file of tensors that is being written; all methods are jobs of the disk."""

    def __init__(
        self, disk: DiskThread, path: str, tensors: Sequence[TensorInfo]
    ) -> None:
        self._disk, self._path, self._tensors = disk, path, tensors
        self._writer: TensorWriter | None = None
        self.digests: list[str] = []
        self.size = 0

    def create(self) -> None:
        with self._disk.blamed(self._path, "writing"):
            self._writer = TensorWriter(self._path, self._tensors)
            self.size = self._writer.size

    def write(self, data: np.ndarray) -> None:
        assert self._writer is not None, "write() before create()"
        with self._disk.blamed(self._path, "writing"):
            self._writer.write(data.data)

    def finish(self) -> None:
        assert self._writer is not None, "finish() before create()"
        with self._disk.blamed(self._path, "writing"):
            self.digests = self._writer.finish()

    def abort(self) -> None:
        """Removes it, unless it was finished."""
        if self._writer is not None:
            self._writer.abort()
