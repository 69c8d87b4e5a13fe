"""Whether processes that nobody waits for have ended."""

import os
import select


def wait_gone(pid, seconds=30):
    """Waits until the process has ended, without asking again and again."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor):
        return bool(select.select([descriptor], [], [], seconds)[0])
