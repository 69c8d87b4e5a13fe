"""What a process says of its memory and its log."""

import os
import resource
from contextlib import contextmanager

from zstrat.telemetry import log_file, resident_bytes


@contextmanager
def no_descriptor_left():
    """None can be opened: those that are open have the numbers that there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_a_descriptor_left_does_not_fail():
    assert resident_bytes() > 2**20
    with no_descriptor_left():
        assert resident_bytes() == 0
    assert resident_bytes() > 2**20


@contextmanager
def standard_error(path):
    """It goes there meanwhile."""
    kept = os.dup(2)
    opened = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.dup2(opened, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(opened)


def test_where_the_log_of_a_process_is(tmp_path):
    odd = os.fsencode(tmp_path / "worker") + b"-\xff.log"
    with standard_error(odd):
        assert log_file() == f"{tmp_path}/worker-\ufffd.log"
    with standard_error(os.devnull):
        assert log_file() == ""
