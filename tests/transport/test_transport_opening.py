"""What a caller is told that waits for a task in vain."""

import asyncio

import pytest

from zstrat.errors import DeadlineExceededError, PermissionDeniedError
from zstrat.transport._opening import QUICK, REFUSALS, Opening


def soon():
    return asyncio.get_running_loop().time() + 0.01


async def test_handshakes_that_fail_quickly_one_after_the_other_are_a_refusal():
    opening = Opening("/job:ps/task:0 at 10.0.0.1:2222")
    for number in range(REFUSALS - 1):
        opening.handshake_failed(1.0 + number)
    with pytest.raises(DeadlineExceededError, match=r"keys of.*ZSTRAT_KEYS") as raised:
        await opening.wait(soon())
    assert "firewall" not in str(raised.value)
    loop = asyncio.get_running_loop()
    loop.call_soon(opening.handshake_failed, 1.0 + REFUSALS)
    with pytest.raises(PermissionDeniedError, match=r"10\.0\.0\.1.*keygen"):
        await opening.wait(soon() + 20.0)
    with pytest.raises(PermissionDeniedError):
        await opening.wait(soon())


async def test_a_frozen_task_is_not_taken_for_one_with_other_keys():
    opening = Opening("/job:ps/task:0")
    for number in range(3 * REFUSALS):
        opening.handshake_failed(number * QUICK)
    with pytest.raises(DeadlineExceededError):
        await opening.wait(soon())


async def test_where_nothing_answers_a_firewall_is_named():
    with pytest.raises(DeadlineExceededError, match=r"nothing answers.*firewall"):
        await Opening("/job:ps/task:0").wait(soon())
