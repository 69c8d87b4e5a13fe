"""Whether a program goes on with a session that another one has left behind.

Each parameter server says what its keys are counted from: from the number of this very
session if it had nothing under the name, else from that of the session which had
created what is there. The law of this file: a program goes on with all of them or with
none, as a model of which a part is gone is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.errors import PSUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._task_session import TaskSession


def adopted(name: str, session: int, tasks: Sequence[TaskSession]) -> int | None:
    """What the keys of all servers are counted from; None if none has anything.

    Args:
        name: What the session is called.
        session: Its number, which nobody had before.
        tasks: The servers, which have answered.

    Raises:
        PSUnavailableError: Some have it, and others have not, or another one; or one
            was lost again.
    """
    origins = {task.name: _origin_of(task) for task in tasks}
    found = set(origins.values())
    if found == {session}:
        return None
    there = [task for task, origin in origins.items() if origin != session]
    empty = [task for task in origins if task not in there]
    if empty:
        raise PSUnavailableError(
            empty[0],
            f"it has nothing of the session {name!r} any more, of which "
            f"{', '.join(there)} still has its part. That stays until a program takes "
            "the cluster without resume=, or with another name: do so and restore the "
            "last checkpoint, or give on_ps_loss='restore', which then begins anew",
            lost=True,
        )
    if len(found) > 1:
        raise PSUnavailableError(
            there[0],
            f"{', '.join(there)} have parts of different sessions {name!r}: make the "
            "strategy without resume=, or with another name, and restore the last "
            "checkpoint",
            lost=True,
        )
    return origins[there[0]]


def _origin_of(task: TaskSession) -> int:
    """What it has said when it was opened."""
    if task.opened is None:
        raise PSUnavailableError(task.name, "it was lost while it was opened")
    return task.opened.origin
