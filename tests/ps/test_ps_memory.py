"""A lookup asks for no more than the machine has."""

import numpy as np
import pytest
from ps_stores import create_in

from zstrat import memory
from zstrat.errors import ResourceExhaustedError
from zstrat.ps import OptimizerEngine, Store
from zstrat.ps.store import _lookups
from zstrat.wire import PullRows, VariableEntry

MiB = 2**20


def test_a_lookup_may_take_a_quarter_of_what_is_left(monkeypatch):
    store = Store(OptimizerEngine(lambda code: None), task="/job:ps/task:0")
    row = np.zeros((1, MiB // 4), np.float32)
    create_in(store, [VariableEntry(1, "table", True, False)], (row,))
    monkeypatch.setattr(_lookups, "available_bytes", lambda: 100 * MiB)
    assert store.plan_rows([], [1], (np.zeros(24, int),)).work > 24 * MiB
    with pytest.raises(ResourceExhaustedError, match=f"of {100 * MiB} that are left"):
        store.plan_rows([], [1], (np.zeros(26, int),))
    indices = (np.zeros(26, int), np.zeros(3, int))
    asked, promised = PullRows(7, [], [1, 2], indices), []
    _lookups.promise_large_reply(store.variables, asked, promised.append)
    assert promised == [26 * MiB]


def test_what_the_kernel_says_is_believed_if_it_says_anything(monkeypatch, tmp_path):
    facts = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_FACTS", facts)
    assert memory.available_bytes() is None
    facts.write_text("MemTotal: 9 kB\nMemAvailable:    12 kB\n")
    assert memory.available_bytes() == 12 * 1024
