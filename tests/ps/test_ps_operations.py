"""Each request of the store is a change that a backup replays, or a read."""

import re

import pytest

import zstrat.wire
from zstrat.ps import CHANGES, OPERATIONS
from zstrat.wire import (
    READ_ANSWERS,
    REQUESTS,
    AskLeases,
    AskParts,
    CreateVariables,
    Exchange,
    Fence,
    InitializeVariables,
    Push,
    RaiseMark,
)

LOGGED_AS = {Exchange: Push, InitializeVariables: CreateVariables}
"""Changes that a primary logs as another message."""

REQUESTS_OF_STORE = (*OPERATIONS, Exchange)


@pytest.mark.parametrize("cls", REQUESTS_OF_STORE, ids=lambda c: c.__name__)
def test_a_request_is_a_change_or_its_answer_a_read(cls):
    """The answer to a change waits for the backup, that to a read need not."""
    (answer,) = re.findall(r"nswered by\s+`(\w+)`", cls.__doc__)
    is_read = getattr(zstrat.wire, answer) in READ_ANSWERS
    is_change = LOGGED_AS.get(cls, cls) in CHANGES
    assert is_read != is_change, (
        f"{cls.__name__} needs a row in CHANGES of ps/replication/_replay.py, or "
        f"@read_answer in place of @message at {answer}, if it changes nothing"
    )


OF_STEPS = {AskLeases, AskParts, Fence, RaiseMark}
"""Requests about steps, which ps/_step_requests.py answers."""


def test_each_request_about_variables_is_answered():
    requests = {cls for cls in REQUESTS if "_variable_messages" in cls.__module__}
    missing = requests - {*REQUESTS_OF_STORE} - OF_STEPS
    assert not missing, "add a row to OPERATIONS of ps/_requests.py"
