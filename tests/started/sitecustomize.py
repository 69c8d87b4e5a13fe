"""What every Python that a test starts does first (`conftest.py` puts this folder on
its PYTHONPATH), but for daemons, which are tested as they are at users'.

Programs of tests live for a second or two. In that time jax is imported, and to search
its objects for garbage, while it is imported and when the program ends, would be a
quarter of all that the program does."""

import atexit
import gc
import sys

if not any(word.startswith("zstrat.daemons.") for word in sys.orig_argv):
    gc.set_threshold(200_000, 50, 100)
    atexit.register(gc.freeze)
