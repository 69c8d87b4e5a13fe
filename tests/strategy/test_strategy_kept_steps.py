"""Threads that share the steps of one strategy."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from zstrat.strategy.replica import _function_cache
from zstrat.strategy.replica._function_cache import FunctionCache, given, run_as

THREADS = 4


@pytest.fixture
def hurried():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_two_that_begin_at_once_share_one_step():
    both = threading.Barrier(2)

    def make():
        both.wait(60)
        return lambda: None

    def fn():
        pass

    kept = FunctionCache(make)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(kept.step_of, [fn, fn])
    assert one is other is kept.step_of(fn)


def test_all_may_forget_the_oldest(hurried, monkeypatch):
    monkeypatch.setattr(_function_cache, "MAX_STEPS", 1)
    all_of_them = threading.Barrier(THREADS)

    def make():
        all_of_them.wait(60)
        return lambda: given()()

    kept = FunctionCache(make)

    def run(number):
        fns = [eval(f"lambda: {number}") for _ in range(20)]  # each has its own code
        return {run_as(kept.step_of(fn).step, fn, (), {}) for fn in fns}

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(run, range(THREADS)))
    assert found == [{number} for number in range(THREADS)]
