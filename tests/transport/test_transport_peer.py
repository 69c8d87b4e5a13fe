"""One connection: greeting, requests, goodbye; driven with frames and numbers."""

import numpy as np
import pytest
from transport_pair import flow, hello, new_peer

from zstrat.config import Limits
from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    NotFoundError,
    PeerLostError,
    ProtocolError,
    VersionMismatchError,
)
from zstrat.wire import (
    Beat,
    Chunk,
    Credit,
    Done,
    Fetched,
    Inspect,
    Offer,
    Pulled,
    encode,
)
from zstrat.wire.connection import Answered, Closed, OrderState, failure, mismatch


def test_the_initiator_speaks_first_and_both_know_each_other(pair):
    assert pair.client.state is pair.server.state is OrderState.OPEN
    assert pair.client.hello == hello("ps", 0)
    assert pair.server.name == "worker:1 (host a-host, pid 42)"


def test_another_protocol_is_refused_with_words_on_both_sides():
    client = new_peer(hello("worker", 1, protocol=99), True)
    server = new_peer(hello("ps", 0), False)
    (closed,) = flow(client, server)
    assert isinstance(closed.refusal, VersionMismatchError)
    (told,) = flow(server, client)
    assert isinstance(told.refusal, VersionMismatchError)
    assert "speaks protocol 99" in str(told.refusal)
    assert "install the same zstrat" in str(told.refusal)


def test_the_wrong_task_behind_an_address_is_named():
    client = new_peer(hello("chief", 0), True, expect=("ps", 0))
    server = new_peer(hello("worker", 3), False)
    (greeted,) = flow(client, server)
    server.accept(greeted.hello, 0.0)
    (closed,) = flow(server, client)
    assert "expected ps:0, but worker:3" in str(closed.refusal)
    (told,) = flow(client, server)
    assert told.refusal is not None


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ("chief", "worker", False),
        ("worker", "chief", False),
        ("chief", "ps", False),
        ("worker", "ps", True),
        ("observer", "worker", True),
    ],
)
def test_code_travels_only_between_equal_pythons(one, other, fits):
    me = hello(one, versions={"python": "3.11.7"})
    you = hello(other, versions={"python": "3.12.1"})
    error = mismatch(me, you)
    assert (error is None) is fits
    assert fits or "same minor version" in str(error)


def test_an_unknown_job_is_refused():
    assert isinstance(mismatch(hello(), hello("janitor")), ProtocolError)


HASTY = [Beat(True), Credit(0, 1), Chunk(3, 0), Offer(1, 2, b""), Inspect(), Done()]
"""Left over from an earlier connection; each is dropped, whatever it would mean now."""


@pytest.mark.parametrize("initiator", [False, True])
def test_what_comes_before_the_greeting_is_dropped_and_counted(initiator):
    client = new_peer(hello("worker", 1), True)
    server = new_peer(hello("ps", 0), False)
    one = client if initiator else server
    for message in HASTY:
        assert one.received([encode(message, 3)[0]], 3.0) == ()
    assert one.early == len(HASTY)
    (greeted,) = flow(client, server, 3.0)
    server.accept(greeted.hello, 3.0)
    flow(server, client, 3.0)
    assert client.state is server.state is OrderState.OPEN


def test_hasty_messages_do_not_give_more_time_to_greet():
    server = new_peer(hello("ps", 0), False)
    orders = []
    for now in range(10):
        server.received([encode(Beat(False))[0]], now / 2)
        orders += server.tick(now / 2)
    (closed,) = orders
    assert "did not greet" in closed.reason
    assert "10 other messages" in closed.reason


def test_requests_are_answered_by_number_in_any_order(pair):
    pair.client.request(Inspect(), "a", 10.0)
    pair.client.request(Inspect(), "b", 10.0)
    first, second = flow(pair.client, pair.server)
    pair.server.reply(second.number, Pulled([2], ()))
    pair.server.reply(first.number, Done())
    assert flow(pair.server, pair.client) == [
        Answered("b", Pulled([2], ())),
        Answered("a", Done()),
    ]


def test_a_second_reply_is_ignored(pair):
    pair.client.request(Inspect(), "a", 10.0)
    (request,) = flow(pair.client, pair.server)
    pair.server.reply(request.number, Done())
    pair.server.reply(request.number, Pulled([1], ()))
    assert flow(pair.server, pair.client) == [Answered("a", Done())]


def test_a_failure_arrives_as_the_error(pair):
    pair.client.request(Inspect(), "a", 10.0)
    (request,) = flow(pair.client, pair.server)
    pair.server.reply(request.number, failure(NotFoundError("variable 7")))
    ((token, error),) = flow(pair.server, pair.client)
    assert token == "a"
    assert isinstance(error, NotFoundError)
    assert str(error) == "variable 7"


def test_a_reply_that_cannot_be_sent_is_a_failure(pair):
    pair.client.request(Inspect(), "a", 10.0)
    (request,) = flow(pair.client, pair.server)
    pair.server.reply(request.number, Fetched((np.array(["text"]),)))
    ((_, error),) = flow(pair.server, pair.client)
    assert isinstance(error, TypeError)


def test_a_deadline_passes_once_and_the_late_answer_is_dropped(pair):
    pair.client.request(Inspect(), "a", 2.0)
    pair.client.request(Inspect(), "b", 50.0)
    first, _ = flow(pair.client, pair.server)
    assert pair.client.due <= 2.0
    assert pair.client.tick(1.9) == []
    ((token, error),) = pair.client.tick(2.0)
    assert token == "a"
    assert isinstance(error, DeadlineExceededError)
    assert "Inspect" in str(error)
    pair.server.reply(first.number, Done())
    assert flow(pair.server, pair.client) == []
    assert pair.client.late == 1


def test_too_many_open_requests_are_refused_on_both_sides(pair):
    for token in range(8):
        pair.client.request(Inspect(), token, 10.0)
    with pytest.raises(BusyError):
        pair.client.request(Inspect(), 8, 10.0)
    server = new_peer(hello("ps", 0), False, Limits(requests=2))
    client = new_peer(hello("worker", 1), True)
    (greeted,) = flow(client, server)
    server.accept(greeted.hello, 0.0)
    flow(server, client)
    for token in "abc":
        client.request(Inspect(), token, 10.0)
    assert len(flow(client, server)) == 2
    ((token, error),) = flow(server, client)
    assert token == "c"
    assert isinstance(error, BusyError)


def test_goodbye_ends_both_sides_with_the_reason(pair):
    pair.client.request(Inspect(), "a", 99.0)
    failed, _ = pair.client.leave("the program ended")
    assert isinstance(failed.error, PeerLostError)
    assert not failed.error.left  # it is we who go
    assert flow(pair.client, pair.server) == [
        Closed("it left: the program ended", left=True)
    ]


def test_who_waits_hears_that_the_other_left_on_purpose(pair):
    pair.client.request(Inspect(), "a", 99.0)
    pair.server.leave("it was shut down")
    failed, closed = flow(pair.server, pair.client)
    assert failed.error.left
    assert closed.left
    again = type(failed.error)(*failed.error.args)
    assert (again.peer, again.reason, again.left) == (
        failed.error.peer,
        failed.error.reason,
        True,
    )
