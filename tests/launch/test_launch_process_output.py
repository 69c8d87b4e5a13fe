"""What a process prints is heard, by whom it is meant for, and stays in its log."""

import io
import logging
import os
import threading
import warnings

import pytest

from zstrat.launch import ProcessOutput


class Heard:
    """A listener, and the standard output that it hears."""

    def __init__(self):
        self.output, self.log, self.texts = ProcessOutput(), io.BytesIO(), []
        self.out = self.output.stream(1, self.log, "utf-8", "replace")

    def listen(self):
        self.output.listen(lambda stream, text: self.texts.append((stream, text)))

    def print(self, *words):
        print(*words, file=self.out)


@pytest.fixture
def heard():
    return Heard()


def test_what_is_printed_is_heard_and_is_in_the_log_at_once(heard):
    heard.print("before")
    heard.listen()
    heard.print("loss", 0.5)
    assert "".join(text for _, text in heard.texts) == "loss 0.5\n"
    assert {stream for stream, _ in heard.texts} == {1}
    assert heard.log.getvalue() == b"before\nloss 0.5\n"
    heard.output.listen(None)
    heard.print("after")
    assert len(heard.log.getvalue().splitlines()) == 3
    assert "after" not in "".join(text for _, text in heard.texts)


def test_a_process_that_was_forked_is_not_heard(heard, monkeypatch):
    """The listener of a child may wait for a lock that a thread of the parent had."""
    heard.listen()
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)  # as in the child
    heard.print("child")
    monkeypatch.undo()
    heard.print("parent")
    assert "".join(text for _, text in heard.texts) == "parent\n"
    assert heard.log.getvalue() == b"child\nparent\n"


def test_a_thread_of_before_is_not_heard_and_one_of_now_is(heard):
    go, done = threading.Event(), threading.Event()

    def left():
        assert go.wait(60)
        heard.print("of the session before")
        done.set()

    threading.Thread(target=left).start()
    heard.listen()
    reader = threading.Thread(target=heard.print, args=("of this one",))
    reader.start()
    reader.join()
    go.set()
    assert done.wait(60)
    assert "".join(text for _, text in heard.texts) == "of this one\n"
    assert b"of the session before" in heard.log.getvalue()


def test_a_record_that_a_handler_of_the_user_writes_is_heard_once(heard):
    heard.listen()
    root, records = logging.getLogger(), heard.output.records()
    above, logger = map(logging.getLogger, ("heard_once", "heard_once.part"))
    handler = logging.StreamHandler(heard.out)
    handler.setLevel(logging.ERROR)
    root.addHandler(records)
    above.addHandler(handler)
    try:
        logger.error("written")
        logger.warning("below its level")
    finally:
        above.removeHandler(handler)
        root.removeHandler(records)
    texts = "".join(text for _, text in heard.texts).splitlines()
    assert texts == ["written", "WARNING:heard_once.part:below its level"]


def test_records_are_heard_as_a_program_shows_them_but_for_our_own(heard):
    heard.listen()
    logger = logging.Logger("a")
    logger.addHandler(heard.output.records())
    logger.warning("loss is %s", "nan")
    shown = warnings.formatwarning("old", UserWarning, "/a/train.py", 7, "f(x)")
    for name, said in (("zstrat", "a"), ("zstrat.worker", "b"), ("py.warnings", shown)):
        logger.handle(logging.LogRecord(name, logging.WARNING, "", 0, said, (), None))
    assert heard.texts == [
        (2, "WARNING:a:loss is nan\n"),
        (2, "/a/train.py:7: UserWarning: old\n  f(x)\n"),
    ]
