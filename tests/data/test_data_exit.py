"""A program that ends in the middle of passes says nothing about them."""

import subprocess
import sys

import pytest

OPEN = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import zstrat as zs

strategy = zs.MirroredStrategy()

def dataset():
    rows = zs.data.Dataset.from_tensor_slices(np.zeros((640, 4), np.float32))
    return rows.shuffle(100, seed=0).repeat().batch(8, drop_remainder=True)

alone = iter(dataset())
next(alone)
mapped = iter(dataset().map(lambda rows: rows, num_parallel_calls=2).prefetch(2))
next(mapped)
distributed = iter(strategy.experimental_distribute_dataset(dataset()))
next(distributed)
"""

BLOCKED = """
import threading
import zstrat.data, zstrat.data._parallel
zstrat.data._parallel.GOODBYE = 0.1

def forever(x):
    return threading.Event().wait() if x else x

mapped = iter(zstrat.data.Dataset.range(9).map(forever, num_parallel_calls=2))
next(mapped)
"""

DRAWING = """
import atexit, threading, time

def says_who_is_left():  # registered first, so called last
    print([each.name for each in threading.enumerate() if "zstrat" in each.name])

atexit.register(says_who_is_left)
import zstrat.data

def slow(x):
    time.sleep(0.05)
    return x

rows = zstrat.data.Dataset.range(10000).map(slow, num_parallel_calls=2)
passes = iter(rows.batch(16).prefetch(2))
next(passes)
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [(OPEN, ""), (BLOCKED, ""), (DRAWING, "[]\n")],
    ids=["open passes", "a function that never returns", "a batch that is drawn"],
)
def test_it_ends_quietly(script, said):
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
