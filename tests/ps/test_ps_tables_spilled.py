"""Tables whose rows are in files: the same rows, and a disk that is full."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from ps_tables import (
    OPTIMIZERS,
    TALL,
    WIDTH,
    bind,
    binding,
    create,
    entry,
    in_order,
    items,
    load,
    look_up,
    run,
    step,
)

from zstrat import memory
from zstrat.errors import ResourceExhaustedError
from zstrat.ps import OptimizerEngine, Store
from zstrat.wire import UpdateOp


def trained(spill):
    """A store of one table that momentum has moved three times, some of it removed."""
    store = Store(OptimizerEngine(load), task="/job:ps/task:0", spill=spill)
    create(store, entry(1))
    run(store, store.plan_optimizer(1, "momentum", b"momentum"))
    tree = {"w": ((1,), (TALL, WIDTH), np.dtype("f4"))}
    bind(store, 1, binding(OPTIMIZERS["momentum"](), tree))
    for number in range(3):
        train(store, np.arange(number * 500, number * 500 + 1000))
    step(store, (1, UpdateOp.REMOVE_ROWS, np.arange(0, 2000, 2)))
    train(store, np.arange(900, 1100))
    return store


def train(store, ids):
    ids = in_order(ids)
    rows = np.ones((len(ids), WIDTH), "f4")
    step(store, (1, UpdateOp.OPTIMIZE_ROWS, ids, rows))


def files_below(folder):
    maps = Path("/proc/self/maps").read_text()
    return {line.split()[4] for line in maps.splitlines() if str(folder) in line}


def test_rows_in_files_are_those_that_would_be_in_memory(tmp_path):
    spilled, here = trained(tmp_path), trained(None)
    assert len(files_below(tmp_path)) == 2, "of values and of the momentum"
    assert not list(tmp_path.iterdir()), "they are gone with the process"
    for one, other in zip(items(spilled), items(here), strict=True):
        np.testing.assert_array_equal(one, other)
    (one,), (other,) = (store.variables[1].slots.values() for store in (spilled, here))
    for cell, kept in zip(one.cells, other.cells, strict=True):
        assert cell.shape == kept.shape
    del spilled, one, cell
    assert not files_below(tmp_path)


def test_a_full_disk_refuses_new_rows_and_keeps_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_ALLOCATED", 2**16)
    store = trained(tmp_path)
    before = items(store)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    many = np.arange(10**6, 10**6 + 2**14)
    with pytest.raises(ResourceExhaustedError, match=str(tmp_path)):
        train(store, many)
    for one, other in zip(items(store), before, strict=True):
        np.testing.assert_array_equal(one, other)
    monkeypatch.undo()
    train(store, many[:10])
    assert len(look_up(store, many[:10])) == 10


def test_a_folder_that_is_gone_is_named(tmp_path):
    store = Store(OptimizerEngine(load), task="/job:ps/task:0", spill=tmp_path / "gone")
    with pytest.raises(ResourceExhaustedError, match="gone"):
        create(store, entry(1))
