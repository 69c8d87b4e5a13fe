"""Nobody who looks at a value ever sees it change; nobody looking means no copy."""

import gc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zstrat.errors import UnavailableError
from zstrat.memory import HUGE_PAGE, aligned, lasting
from zstrat.ps.store import Cell
from zstrat.ps.store._cell import SPARE_KEPT_FOR

DTYPES = [np.float32, np.float64, np.int64, np.bool_, np.complex64, ml_dtypes.bfloat16]


def add_one(cell: Cell) -> bool:
    """One update by numpy; True if it was done in place."""
    source, out = cell.begin()
    np.add(source, np.ones(1, cell.dtype), out=out)
    cell.settle()
    return out is source


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (7, 3)])
def test_a_cell_copies_aligns_and_leases_any_array(dtype, shape):
    initial = np.ones(shape, dtype)
    cell = Cell(initial)
    initial[...] = 0
    lease = cell.lease()
    assert lease.dtype == dtype
    assert lease.shape == shape
    assert lease.all()
    if lease.size:
        assert not lease.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            lease.flags.writeable = True
        assert address(aligned(shape, np.dtype(dtype))) % 64 == 0


@pytest.mark.parametrize("rows", [0, 3, 2**20, 2**20 + 1, 3 * 2**20 - 1])
def test_what_lasts_has_huge_pages_of_its_own(rows):
    made = lasting((rows, 2), np.dtype(np.float16))
    assert made.shape == (rows, 2)
    assert made.dtype == np.float16
    made[...] = 1
    assert made.flags.c_contiguous
    if rows:
        assert address(made) % 64 == 0
    if made.nbytes >= 2 * HUGE_PAGE:
        assert address(made) % HUGE_PAGE == 0
        # The last page, too, is within what was asked for.
        whole, place = made.base, address(made)
        pages = -(-made.nbytes // HUGE_PAGE) * HUGE_PAGE
        assert place + pages <= address(whole) + whole.nbytes


def test_an_array_of_any_layout_becomes_c_order():
    initial = np.asfortranarray(np.arange(12.0).reshape(3, 4))[:, ::2]
    lease = Cell(initial).lease()
    assert lease.flags.c_contiguous
    np.testing.assert_array_equal(lease, initial)


def test_an_update_is_in_place_only_while_nobody_looks():
    cell = Cell(np.zeros(1000))
    assert add_one(cell)
    lease = cell.lease()
    assert address(cell.lease()) == address(lease)
    assert not add_one(cell)
    assert (lease == 1).all()
    assert (cell.lease() == 2).all()
    assert add_one(cell)


@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a[10:20],
        lambda a: a.reshape(-1).view(np.uint8),
        lambda a: a.view(),
        lambda a: a[10:20][2:4].T,
        lambda a: memoryview(a)[5:9],
        lambda a: a.reshape(-1).view(np.uint8).data,
        lambda a: np.frombuffer(a.data, a.dtype),
    ],
)
def test_whatever_was_made_of_a_lease_keeps_its_bytes(derive):
    cell = Cell(np.arange(1000.0))
    part = derive(cell.lease())
    before = bytes(part)
    gc.collect()
    assert not add_one(cell)
    assert bytes(part) == before
    del part
    assert add_one(cell)


def test_readers_that_overlap_updates_cost_one_second_buffer_that_is_given_up_later():
    cell = Cell(np.zeros(1000))
    lease, seen = cell.lease(), set()
    for _ in range(6):
        add_one(cell)
        lease = cell.lease()
        seen.add(address(lease))
    assert len(seen) == 2
    assert cell.held_bytes == 2 * cell.nbytes
    del lease
    for _ in range(SPARE_KEPT_FOR):
        assert add_one(cell)
    assert cell.held_bytes == cell.nbytes


step = jax.jit(lambda value, delta: value - delta, donate_argnums=0)


def subtract(cell: Cell, delta: np.ndarray) -> bool:
    """One update by XLA; True if it wrote where the value was."""
    given = cell.give()
    before = (
        given.unsafe_buffer_pointer()
        if isinstance(given, jax.Array)
        else address(given)
    )
    value = step(given, delta).block_until_ready()
    cell.take_back(value)
    return value.unsafe_buffer_pointer() == before


@pytest.mark.parametrize("dtype", [np.float32, np.int32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [1, 100_000])
def test_xla_never_writes_a_buffer_of_numpy_nor_one_that_somebody_sees(dtype, size):
    one = np.ones(size, dtype)
    cell = Cell(np.full(size, 9, dtype))
    own = cell.give()
    assert not subtract(cell, one)
    assert (own == 9).all()
    assert subtract(cell, one)
    lease = cell.lease()
    assert (lease == 7).all()
    assert not lease.flags.writeable
    part = lease[: size // 2 + 1].view(np.uint8)
    before = part.tobytes()
    del lease
    gc.collect()
    assert not subtract(cell, one)
    assert part.tobytes() == before
    del part
    gc.collect()
    assert subtract(cell, one)
    assert (cell.lease() == 5).all()


def test_a_reader_of_a_buffer_that_goes_to_xla_keeps_what_it_saw():
    cell = Cell(np.full(1000, 3.0, np.float32))
    lease = cell.lease()
    for _ in range(3):
        subtract(cell, np.ones(1000, np.float32))
    assert (lease == 3).all()
    assert (cell.lease() == 0).all()


def test_a_plain_update_of_a_value_of_xla_leaves_its_readers_alone():
    cell = Cell(np.zeros(1000, np.float32))
    cell.take_back(jnp.full(1000, 5, np.float32))
    lease = cell.lease()
    assert not add_one(cell)
    assert (lease == 5).all()
    assert add_one(cell)
    assert (cell.lease() == 7).all()


def test_a_lost_value_says_so_until_it_is_assigned():
    cell = Cell(np.zeros(3, np.float32))
    cell.take_back(jnp.zeros(3))
    cell.lose("out of memory")
    for look in (cell.lease, cell.give):
        with pytest.raises(UnavailableError):
            look()
    cell.overwrite()[...] = 4
    cell.settle()
    assert (cell.lease() == 4).all()


def test_rows_are_lent_in_place_only_while_nobody_looks():
    cell = Cell(np.zeros((6, 3), np.float32))
    rows = cell.rows_in_place()
    assert rows is not None
    assert rows.shape == (6,)
    rows[2:3] = np.full((1, 3), 7, np.float32).view(rows.dtype)[:, 0]
    np.testing.assert_array_equal(cell.look()[2], [7, 7, 7])
    lease = cell.lease()
    assert cell.rows_in_place() is None
    assert not add_one(cell)
    del lease
    # The old buffer is kept for the next reader, and given up by updates in place.
    assert cell.rows_in_place() is None
    for _ in range(SPARE_KEPT_FOR):
        add_one(cell)
    assert cell.rows_in_place() is not None
    pin = cell.pin()
    assert cell.rows_in_place() is None
    pin.release()
    assert cell.rows_in_place() is not None
    cell.take_back(jnp.ones((6, 3)))
    assert cell.rows_in_place() is None
