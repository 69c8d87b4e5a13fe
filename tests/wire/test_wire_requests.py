"""The class of a request states who may send it, and whether it may be repeated."""

from __future__ import annotations

import re

import pytest

from zstrat.errors import PermissionDeniedError, ProtocolError
from zstrat.wire import (
    MESSAGES,
    REQUESTS,
    AskCopies,
    Done,
    Goodbye,
    Job,
    Push,
    check_sender,
)

TASKS = [m for m in MESSAGES.values() if "_link_messages" not in m.__module__]
"""Messages that tasks handle, and not the connection by itself."""


@pytest.mark.parametrize("cls", TASKS, ids=lambda cls: cls.__name__)
def test_what_is_answered_states_its_senders(cls):
    """A task would refuse it otherwise (`check_sender`)."""
    words = " ".join(str(cls.__doc__).split())
    assert "nswered by" not in words or cls in REQUESTS, "use @request, not @message"
    if cls in REQUESTS:
        assert re.search(r"nswered (at once )?by|[Aa] notice", words), "what answers?"
        assert REQUESTS[cls].senders


def test_a_request_is_refused_from_other_roles():
    check_sender("/job:ps/task:0", "chief:0", Job.CHIEF, AskCopies(5))
    with pytest.raises(PermissionDeniedError, match=r"AskCopies.*chief.*worker:1"):
        check_sender("/job:ps/task:0", "worker:1", Job.WORKER, AskCopies(5))


@pytest.mark.parametrize("message", [Done(), Goodbye("over")])
def test_what_states_no_senders_is_refused_from_everybody(message):
    for role in Job:
        with pytest.raises(ProtocolError, match=type(message).__name__):
            check_sender("/job:ps/task:0", f"{role}:0", role, message)


def test_a_message_that_is_decoded_is_of_the_class_that_has_a_rule():
    """Decorators of dataclasses with slots make a new class."""
    assert type(Push(1, 2, 0, 2, [], ())) in REQUESTS
