"""At the end of a program memory is freed that nobody sends from any more."""

import subprocess
import sys

SCRIPT = """
from zstrat.transport import _loop
from zmq.utils.garbage import gc  # as the first large message does

class Portal:
    def close(self):
        print("the portal closes")

portal = Portal()
_loop._open.add(portal)
gc.stop = lambda: print("pyzmq frees what was being sent")
"""


def test_portals_close_before_pyzmq_frees_the_memory_of_messages():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "the portal closes",
        "pyzmq frees what was being sent",
    ]
