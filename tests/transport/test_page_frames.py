"""What a page is shown, decided without I/O: frames, history, and who has the token."""

from __future__ import annotations

import json
import math

import pytest

from zstrat.transport.health import (
    BadRequest,
    PageToken,
    RunLook,
    RunPicture,
    parse_request,
)

METRICS = {
    "steps_per_s": 12.5,
    "tasks": {
        "ps:0": {"state": "open", "bytes_in_per_s": 5.0, "memory": 100},
        "worker:0": {"state": "open", "bytes_in_per_s": 7.0, "memory": 20},
    },
}


def metrics(points=0, lines=0, **more):
    scalars = {"loss": [[step, step / 2, 1.0] for step in range(points)]}
    logs = [[n, "worker:0", "INFO", f"line {n}"] for n in range(lines)]
    return {**METRICS, "scalars": scalars, "logs": logs, **more}


def seen(picture, look, now, after=None):
    picture.see(look, now)
    return json.loads(picture.frame(picture.number - 1 if after is None else after))


def test_a_whole_frame_has_the_metrics_as_they_are():
    picture = RunPicture("abc")
    told = metrics(3, 2)
    frame = seen(picture, RunLook(1, "chief:0", told), 100.0)
    assert (frame["kind"], frame["state"], frame["run"]) == ("whole", "runs", "abc.1")
    assert frame["metrics"] == told
    assert frame["history"] == [[0.0, 12.5, 5.0, 0.0, 120.0]]
    assert frame["since"] == {"ps:0": 0.0, "worker:0": 0.0}
    assert frame["held_up"] == []
    busy = {"ps:0": {"state": "open", "busy": 0.75}}
    frame = seen(picture, RunLook(1, "chief:0", {**told, "tasks": busy}), 101.0)
    (limit,) = frame["held_up"]
    assert (limit["task"], "75 %" in limit["why"]) == ("ps:0", True)


def test_a_change_has_of_what_grows_the_new_alone():
    picture = RunPicture("abc")
    seen(picture, RunLook(1, "chief:0", metrics(3, 2)), 100.0)
    change = seen(picture, RunLook(1, "chief:0", metrics(5, 3)), 101.0)
    assert (change["kind"], change["seconds"]) == ("change", 1.0)
    assert change["history"] == [[1.0, 12.5, 5.0, 0.0, 120.0]]
    assert change["metrics"]["scalars"] == {"loss": [[3, 1.5, 1.0], [4, 2.0, 1.0]]}
    assert change["metrics"]["logs"] == [[2, "worker:0", "INFO", "line 2"]]
    assert change["metrics"]["tasks"] == METRICS["tasks"]
    for late in (0, picture.number - 2):
        whole = json.loads(picture.frame(late))
        assert whole["metrics"] == metrics(5, 3)
        assert len(whole["history"]) == 2


def test_since_when_a_task_is_lost():
    picture = RunPicture("abc")
    lost = metrics(tasks={"worker:0": {"state": "lost"}})
    for now in range(5):
        frame = seen(picture, RunLook(1, "chief:0", metrics()), 10.0 + now)
    assert frame["since"]["worker:0"] == 0.0
    for now in range(5, 8):
        frame = seen(picture, RunLook(1, "chief:0", lost), 10.0 + now)
    assert (frame["since"], frame["seconds"]) == ({"worker:0": 5.0}, 7.0)


def test_the_last_picture_stays_until_another_run_begins():
    picture = RunPicture("abc")
    assert seen(picture, RunLook(), 1.0)["state"] == "none"
    seen(picture, RunLook(1, "chief:0", metrics(3)), 2.0)
    hangs = RunLook(1, "chief:0", state="hangs", words="it has not turned for 5 s")
    frame = seen(picture, hangs, 9.0, after=0)
    assert (frame["state"], frame["words"]) == ("hangs", "it has not turned for 5 s")
    assert frame["metrics"] == metrics(3)
    frame = seen(picture, RunLook(), 10.0, after=0)
    assert (frame["state"], frame["seconds"]) == ("ended", 0.0)
    assert frame["metrics"] == metrics(3)
    frame = seen(picture, RunLook(2, "chief:0", metrics(1)), 11.0)
    assert (frame["kind"], frame["run"]) == ("whole", "abc.2")
    assert len(frame["history"]) == 1


def test_the_history_of_a_long_run_is_all_of_it_in_bounded_memory():
    picture = RunPicture("abc")
    whole = 0
    for second in range(2000):
        told = {"steps_per_s": float(second)}
        frame = seen(picture, RunLook(1, "chief:0", told), float(second))
        whole += frame["kind"] == "whole"
    rows = json.loads(picture.frame(0))["history"]
    # Two halvings, at 720 and 1440: rows of four looks each, the first 0, 1, 2, 3.
    assert (len(rows), whole) == (500, 3)
    assert rows[0] == [1.5, 1.5, 0.0, 0.0, 0.0]
    assert rows[-1][:2] == [1997.5, 1997.5]


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        ([], [], []),
        ([], [1, 2], [1, 2]),
        ([1, 2], [1, 2], []),
        ([1, 2], [1, 2, 3], [3]),
        ([1, 2, 3], [2, 3, 4], [4]),
        ([1, 2, 3], [7, 8, 9], [7, 8, 9]),
        ([1], [1, 1], [1]),
        ([1, 2, 1], [2, 1, 1], [1]),
    ],
)
def test_what_came_behind(before, now, new):
    picture, frame = RunPicture("abc"), {}
    for second, rows in enumerate((before, now)):
        logs = [[each] for each in rows]
        frame = seen(picture, RunLook(1, "chief:0", {"logs": logs}), float(second))
    assert frame["metrics"]["logs"] == [[each] for each in new]


def test_a_loss_that_is_nan_is_shown_once():
    picture = RunPicture("abc")
    odd = [[0, 0.0, math.nan], [1, 1.0, math.inf], [2, 2.0, -math.inf]]
    for second in range(2):
        # Anew each time, as after a way over the network: this NaN is not that NaN.
        told = {"scalars": {"loss": [[*row[:2], float(str(row[2]))] for row in odd]}}
        frame = seen(picture, RunLook(1, "chief:0", told), float(second))
        odd.append([3, 3.0, 0.5])
    assert frame["metrics"]["scalars"]["loss"] == [[3, 3.0, 0.5]]
    whole = json.loads(picture.frame(0))["metrics"]["scalars"]["loss"]
    assert [row[2] for row in whole] == ["NaN", "Infinity", "-Infinity", 0.5]


def test_no_text_can_end_an_event_or_leave_ascii():
    picture = RunPicture("abc")
    odd = "\n\ndata: x\r\n\u2028 \udc80 \U0001f600 </script>"
    picture.see(RunLook(1, odd, {"tasks": {odd: {"state": odd}}}), 0.0)
    text = picture.frame(0)
    assert text.isascii()
    assert not {"\n", "\r"} & {*text}


def request(line, **headers):
    lines = [f"GET {line} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return parse_request("\r\n".join([*lines, "", ""]).encode())


def test_who_has_the_token():
    token = PageToken()
    good, bad = token.secret, token.secret[:-1] + "~"
    assert len(good) >= 32
    assert token.is_in_address(request(f"/?a=1&token={good}"))
    assert not token.is_in_address(request(f"/?token={bad}"))
    assert not token.is_in_address(request("/?token="))
    assert token.is_shown(request("/", Cookie=f"a=1; zstrat_91={good}"), 91)
    assert not token.is_shown(request("/", Cookie=f"zstrat_92={good}"), 91)
    assert not token.is_shown(request("/", Cookie=f"zstrat_91={bad}"), 91)
    assert token.is_shown(request("/", Authorization=f"bearer {good}"), 91)
    assert not token.is_shown(request("/", Authorization=f"Basic {good}"), 91)
    assert not token.is_shown(request(f"/?token={good}"), 91)
    assert token.cookie(91).startswith(f"zstrat_91={good}; ")


@pytest.mark.parametrize(
    "wrong", ["", "short", "a" * 15, "a b" * 9, "ü" * 20, "a\n" * 9]
)
def test_a_token_that_could_be_guessed_or_breaks_a_header_is_refused(wrong):
    with pytest.raises(ValueError, match="16 to 128 letters, digits"):
        PageToken(wrong)


def test_a_request_with_anything_in_its_query_is_one():
    assert request("/events?%00=%ff&token=%zz").query == "%00=%ff&token=%zz"
    with pytest.raises(BadRequest):
        parse_request(b"GET /?a b HTTP/1.1\r\n\r\n")
