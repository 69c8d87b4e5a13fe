"""A pin is the array as it was, whatever happens to its cell afterwards."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tiers import examples

from zstrat.errors import NotFoundError, ResourceExhaustedError
from zstrat.ps.store import Cell, Pin, Write, _pins

SHAPES = [(), (0,), (7,), (5, 3), (13, 2), (4, 0), (2, 40), (1, 2, 3)]
DTYPES = [np.float32, np.int8, ml_dtypes.bfloat16]


def bytes_of(array: np.ndarray) -> bytes:
    return np.asarray(array, order="C").tobytes()


def read(pin: Pin, start: int, stop: int) -> bytes:
    out = np.full(stop - start, 0xA5, np.uint8)
    pin.copy(start, out)
    view = pin.view(start, stop)
    if view is not None:
        assert view.tobytes() == out.tobytes()
        assert not view.flags.writeable
    return out.tobytes()


class Pins(RuleBasedStateMachine):
    """One cell, updated in all ways; pins taken at any time, read in any pieces."""

    def __init__(self):
        super().__init__()
        self.pins: list[tuple[Pin, bytes, int]] = []
        self.leases: list[tuple[np.ndarray, bytes]] = []
        self.patched = pytest.MonkeyPatch()

    def teardown(self):
        self.patched.undo()

    @initialize(
        shape=st.sampled_from(SHAPES),
        dtype=st.sampled_from(DTYPES),
        block=st.integers(1, 40),
        widest=st.sampled_from([8, 10**6]),
    )
    def start(self, shape, dtype, block, widest):
        self.patched.setattr(_pins, "_BLOCK", block)
        self.patched.setattr(_pins, "WIDEST", widest)
        size = int(np.prod(shape))
        self.value = np.arange(size).reshape(shape).astype(dtype)
        self.cell, self.turn = Cell(self.value), 0

    def fresh(self) -> np.ndarray:
        self.turn += 1
        return (np.ones(self.value.shape) * (self.turn % 50)).astype(self.value.dtype)

    @rule()
    def pin(self):
        self.pins.append((self.cell.pin(), bytes_of(self.value), 0))

    @rule()
    def lease(self):
        self.leases.append((self.cell.lease(), bytes_of(self.value)))

    @precondition(lambda self: self.leases)
    @rule()
    def let_go(self):
        self.leases.pop()

    @precondition(lambda self: self.value.shape)
    @rule(data=st.data())
    def write_rows(self, data):
        most = self.value.shape[0] - 1
        ids = st.lists(st.integers(0, most), max_size=8) if most >= 0 else st.just([])
        rows = np.array(data.draw(ids), np.intp)
        self.cell.reserve([Write.ROWS])
        out = self.cell.begin_rows(rows)
        out[rows] = self.fresh()[: len(rows)] if not len(rows) else self.fresh()[rows]
        self.cell.settle()
        self.value = np.array(self.value)
        self.value[rows] = (
            np.ones((len(rows), *self.value.shape[1:])) * (self.turn % 50)
        ).astype(self.value.dtype)

    @rule(anew=st.booleans())
    def write_all(self, anew):
        self.cell.reserve([Write.REPLACE if anew else Write.WHOLE])
        out = self.cell.overwrite() if anew else self.cell.begin()[1]
        np.copyto(out, self.fresh())
        self.cell.settle()
        self.value = np.array(out)

    @rule()
    def give_up(self):
        """An update that begins, writes nothing and is never settled."""
        self.cell.begin()

    @precondition(lambda self: self.value.dtype != np.int8)
    @rule()
    def optimize(self):
        self.value = self.fresh()
        self.cell.give()
        self.cell.take_back(jnp.asarray(self.value))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def forget(self, data):
        at = data.draw(st.integers(0, len(self.pins) - 1))
        pin, was, done = self.pins[at]
        done = data.draw(st.integers(done, len(was)))
        pin.forget(done)
        self.pins[at] = (pin, was, done)
        if pin.is_over:
            with pytest.raises(NotFoundError):
                pin.require()
            del self.pins[at]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def read_a_part(self, data):
        pin, was, done = data.draw(st.sampled_from(self.pins))
        start = data.draw(st.integers(done, len(was)))
        stop = data.draw(st.integers(start, len(was)))
        assert read(pin, start, stop) == was[start:stop]

    @invariant()
    def nothing_changed(self):
        for pin, was, done in self.pins:
            assert read(pin, done, len(was)) == was[done:]
        for lease, was in self.leases:
            assert bytes_of(lease) == was


Pins.TestCase.settings = examples(60, stateful_step_count=20)
TestPins = Pins.TestCase


def table(rows: int = 1000, width: int = 64) -> tuple[Cell, np.ndarray]:
    value = np.random.default_rng(3).normal(size=(rows, width)).astype("f4")
    return Cell(value), value


def scatter(cell: Cell, rows: np.ndarray) -> bool:
    """Writes rows; True if that was done in place."""
    before = cell.look()
    out = cell.begin_rows(rows)
    out[rows] = 0
    cell.settle()
    return out is before


def test_rows_are_written_in_place_and_logged_once():
    cell, value = table()
    pin = cell.pin()
    rows = np.arange(0, 1000, 3)
    assert scatter(cell, rows)
    logged = pin.log_bytes
    assert logged == len(rows) * 64 * 4 + 4 * 1000
    assert scatter(cell, rows)
    assert pin.log_bytes == logged
    assert not cell.is_shared
    assert cell.held_bytes == cell.nbytes
    out = np.empty(pin.nbytes, np.uint8)
    pin.copy(0, out)
    assert out.tobytes() == value.tobytes()


def test_rows_that_nobody_wants_any_more_are_not_logged():
    cell, _ = table()
    pin = cell.pin()
    pin.forget(500 * 256)
    assert scatter(cell, np.arange(0, 510))
    assert pin.log_bytes == 10 * 256 + 4 * 1000


def test_a_dense_update_goes_beside_once_and_then_in_place_again():
    cell, value = table()
    pin = cell.pin()
    assert cell.is_pinned
    old = cell.look()
    source, out = cell.begin()
    assert source is old
    assert out is not old
    np.copyto(out, 1)
    cell.settle()
    assert pin.is_frozen
    assert not cell.is_pinned
    again = cell.overwrite()
    assert again is out
    cell.settle()
    view = pin.view(0, pin.nbytes)
    assert view.tobytes() == value.tobytes()
    assert np.shares_memory(view, old)


def test_what_is_on_the_device_is_pinned_where_it_is():
    cell, _ = table()
    value = jnp.full((1000, 64), 5, jnp.float32)
    cell.take_back(value)
    pin = cell.pin()
    assert pin.is_frozen
    assert not cell.is_pinned
    assert np.shares_memory(pin.view(0, pin.nbytes), np.asarray(value))


def test_a_released_pin_costs_nothing_and_gives_nothing():
    cell, _ = table()
    pin = cell.pin()
    pin.release()
    assert not cell.is_pinned
    source, out = cell.begin()
    assert source is out
    with pytest.raises(NotFoundError):
        pin.copy(0, np.empty(4, np.uint8))


def test_an_update_does_not_fail_when_the_log_has_no_memory(monkeypatch):
    def full(*_: object):
        raise MemoryError

    cell, _ = table()
    pin = cell.pin()
    monkeypatch.setattr(_pins.UndoLog, "add", full)
    assert scatter(cell, np.arange(5))
    assert (cell.lease()[:5] == 0).all()
    with pytest.raises(ResourceExhaustedError):
        pin.copy(0, np.empty(4, np.uint8))
