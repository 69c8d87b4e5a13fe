"""Disks that are full."""

from __future__ import annotations

import contextlib
import resource

import pytest


@pytest.fixture
def full_disk():
    """``with full_disk(size)``: no file of this process can grow beyond ``size``; the
    system says EFBIG, as a full quota does."""

    @contextlib.contextmanager
    def limited(size: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
