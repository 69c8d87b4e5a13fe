"""Finds the session that another program holds, by asking a parameter server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zstrat.errors import DeadlineExceededError
from zstrat.wire import JoinSession, SessionOpened

from ._servers import ANSWERING

if TYPE_CHECKING:
    from ._lane import MakeTaskLink


async def session_of(make_link: MakeTaskLink, address: str, timeout: float) -> int:
    """The number of the session that ps 0 serves, once there is one whose program is
    alive.

    Raises:
        DeadlineExceededError: There was none in ``timeout`` seconds.
        VersionMismatchError, PermissionDeniedError: The ps will never answer us.

    Cancellation: nothing is lost.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    link = make_link(
        address,
        name="/job:ps/task:0",
        expect=("ps", 0),
        on_notice=_ignored,
        on_open=_ignored,
        on_lost=_ignored,
    )
    link.start()
    try:
        await link.wait_open(deadline)
        wish = JoinSession(0, [], [], max(0.0, deadline - loop.time()))
        answer = await link.submit(wish, deadline=deadline + ANSWERING)
    except DeadlineExceededError as error:
        raise DeadlineExceededError(
            f"no program has created variables on the ps at {address} in {timeout} s: "
            "start the chief, or worker 0 of a cluster without one, which does so "
            f"({error})"
        ) from None
    finally:
        await link.close()
    assert isinstance(answer, SessionOpened), answer
    return answer.session


def _ignored(_: object) -> None:
    pass
