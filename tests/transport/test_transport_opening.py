"""What a caller is told that waits for a task in vain."""

import asyncio

import pytest

from zstrat.errors import DeadlineExceededError, PermissionDeniedError
from zstrat.transport._opening import (
    DOUBTFUL_REFUSALS,
    QUICK,
    REFUSALS,
    Opening,
)


def soon():
    return asyncio.get_running_loop().time() + 0.01


@pytest.mark.parametrize(
    ("by_task", "most"), [(True, REFUSALS), (False, DOUBTFUL_REFUSALS)]
)
async def test_handshakes_that_fail_quickly_one_after_the_other_are_a_refusal(
    by_task, most
):
    opening = Opening("/job:ps/task:0 at 10.0.0.1:2222")
    for number in range(most - 1):
        opening.handshake_failed(1.0 + number, by_task)
    assert opening.asks_who
    with pytest.raises(DeadlineExceededError, match="ZSTRAT_KEYS") as raised:
        await opening.wait(soon())
    assert "firewall" not in str(raised.value)
    loop = asyncio.get_running_loop()
    loop.call_soon(opening.handshake_failed, 1.0 + most, by_task)
    with pytest.raises(PermissionDeniedError, match=r"\b10\.0\.0\.1\b"):
        await opening.wait(soon() + 20.0)
    with pytest.raises(PermissionDeniedError):
        await opening.wait(soon())


async def test_handshakes_far_apart_are_no_refusal():
    opening = Opening("/job:ps/task:0")
    for number in range(3 * DOUBTFUL_REFUSALS):
        opening.handshake_failed(number * QUICK, by_task=True)
    with pytest.raises(DeadlineExceededError):
        await opening.wait(soon())


async def test_a_frozen_task_is_not_taken_for_one_with_other_keys():
    opening = Opening("/job:ps/task:0")
    opening.connected()
    for number in range(REFUSALS - 1):
        opening.handshake_failed(0.1 * number, by_task=True)
    opening.handshake_timed_out()
    assert not opening.asks_who
    with pytest.raises(DeadlineExceededError, match="/job:ps/task:0") as raised:
        await opening.wait(soon())
    assert "keys" not in str(raised.value).lower()
    assert not opening.is_denied


async def test_where_nothing_answers_a_firewall_is_named():
    with pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
        await Opening("/job:ps/task:0").wait(soon())
