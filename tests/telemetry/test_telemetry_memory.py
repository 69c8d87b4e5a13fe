"""What a process says of its memory."""

import os
import resource
from contextlib import contextmanager

from zstrat.telemetry import resident_bytes


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
