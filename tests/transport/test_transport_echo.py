"""What other tasks print is shown where a print of the user would be."""

from __future__ import annotations

import contextvars
import io
import sys
import threading
from contextlib import contextmanager

import pytest
from strikes import strikes

from zstrat.testing import leak_check
from zstrat.transport import Echo

MiB = 2**20


@pytest.fixture
def echo():
    with leak_check():
        made = Echo()
        yield made
        made.close()


@contextmanager
def streams(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    yield out, err


def test_each_line_says_whose_it_is_and_goes_to_its_stream(echo, monkeypatch):
    with streams(monkeypatch) as (out, err):
        echo.put("worker:0", 1, "a\n\nb\n")
        echo.put("worker:1", 2, "warned\n")
        echo.put("worker:0", 1, "c\n", 1200)
        echo.show()
    shown = out.getvalue().splitlines()
    assert shown[:3] == ["worker:0| a", "worker:0| ", "worker:0| b"]
    assert shown[3].startswith("worker:0| (1,200 lines are not shown here")
    assert shown[4:] == ["worker:0| c"]
    assert err.getvalue() == "worker:1| warned\n"


def test_colours_stay_and_what_moves_a_cursor_is_shown(echo, monkeypatch):
    with streams(monkeypatch) as (out, _):
        echo.put("w", 1, "\x1b[31mred\x1b[0m\t\x1b[2J\a\n")
        echo.show()
    assert out.getvalue() == "w| \x1b[31mred\x1b[0m\t\\x1b[2J\\x07\n"


def test_text_is_shown_where_the_program_prints_now(echo, monkeypatch):
    """As in two cells of a notebook."""
    for word in ("first", "second"):
        with streams(monkeypatch) as (out, _):
            echo.put("w", 1, f"{word}\n")
            echo.show()
            print("own")
        assert out.getvalue() == f"w| {word}\nown\n"


class Blocked(io.StringIO):
    """A pipe that nobody reads, for a while; notes in which context it is written."""

    cell = contextvars.ContextVar("cell", default="none")

    def __init__(self):
        super().__init__()
        self.reached, self.open = threading.Event(), threading.Event()
        self.cells = []

    def write(self, text):
        self.cells.append(self.cell.get())
        self.reached.set()
        assert self.open.wait(60)
        return super().write(text)


def test_who_puts_text_in_never_waits_and_its_memory_is_bounded(echo, monkeypatch):
    pipe = Blocked()
    monkeypatch.setattr(sys, "stdout", pipe)
    echo.put("w", 1, "first\n")
    assert pipe.reached.wait(60)
    for _ in range(4):
        echo.put("w", 1, "x" * MiB + "\n")
    assert sum(len(text) for _, text in echo.waiting) <= MiB + 100
    assert echo.is_behind
    pipe.open.set()
    echo.show()
    assert not echo.is_behind
    echo.put("w", 1, "last\n")
    echo.show()
    lines = pipe.getvalue().splitlines()
    assert "(3 lines are not shown here" in lines[-2]
    assert lines[-1] == "w| last"


def test_the_thread_writes_in_the_context_of_who_waits(echo, monkeypatch):
    pipe = Blocked()
    monkeypatch.setattr(sys, "stdout", pipe)
    context = contextvars.copy_context()
    context.run(Blocked.cell.set, "cell 3")
    echo.place = context
    echo.put("w", 1, "a\n")
    assert pipe.reached.wait(60)
    assert echo.is_behind, "what is being written is not there yet"
    pipe.open.set()
    echo.show()
    assert pipe.cells == ["cell 3"]


def test_a_stream_that_is_closed_or_absent_is_no_error(echo, monkeypatch):
    closed = io.StringIO()
    closed.close()
    for out in (closed, None):
        monkeypatch.setattr(sys, "stdout", out)
        echo.put("w", 1, "a\n")
        echo.show()
    assert not echo.waiting


def test_a_stream_of_few_characters_shows_the_others_escaped(echo, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii"))
    echo.put("w", 1, "é ok\n")
    echo.show()
    assert out.getvalue() == b"w| \\xe9 ok\n"


def test_ctrl_c_anywhere_while_it_is_shown_does_not_hold_the_loop_up(echo, monkeypatch):
    def put():
        with streams(monkeypatch) as (out, _):
            echo.put("w", 1, "goes on\n")
            echo.show()
            return out.getvalue()

    put()
    with streams(monkeypatch):
        for number in strikes(echo.show, "/transport/_echo.py", "/threading.py"):
            text = "w", 1, "text\n"
            loop = threading.Thread(target=echo.put, args=text, daemon=True)
            loop.start()
            loop.join(100)
            assert not loop.is_alive(), number
    assert put().endswith("w| goes on\n")
