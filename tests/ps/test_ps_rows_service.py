"""Lookups, gradients of rows and shipped initializers, driven by messages."""

import asyncio

import ml_dtypes
import numpy as np
import optax
import pytest
from ps_callers import SESSION, Gated, caller
from ps_trees import binding, message

from zstrat.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    PermissionDeniedError,
    ProtocolError,
)
from zstrat.ps import _requests as requests_module
from zstrat.wire import (
    CreateOptimizer,
    Done,
    InitialEntry,
    InitializeVariables,
    Inspect,
    Job,
    Pull,
    Pulled,
    PullRows,
    Push,
    Read,
    Update,
    UpdateOp,
)


def counted(shape, dtype, partition_shape, partition_offset):
    """Every element is its number in the whole array."""
    whole = np.arange(np.prod(shape)).reshape(shape)
    cut = [
        slice(o, o + n) for o, n in zip(partition_offset, partition_shape, strict=True)
    ]
    return whole[tuple(cut)].astype(dtype)


def broken(shape, dtype, partition_shape, partition_offset):
    raise ZeroDivisionError("no seed")


kept = []


def keeping(shape, dtype, partition_shape, partition_offset):
    kept.append(np.zeros(partition_shape, dtype))
    return kept[-1]


SHIPPED = {
    b"sgd": optax.sgd(0.5),
    b"counted": counted,
    b"broken": broken,
    b"keeping": keeping,
    b"fresh": lambda shape, dtype, partition_shape, **_: np.ones(
        partition_shape, dtype
    ),
    b"wrong shape": lambda shape, dtype, **_: np.zeros(shape, dtype),
    b"wrong dtype": lambda shape, dtype, partition_shape, **_: np.zeros(
        partition_shape
    ),
    b"no callable": 5,
}


@pytest.fixture
async def rig():
    rig = Gated(SHIPPED)
    rig.worker = caller(Job.WORKER, 8)
    value = np.arange(20, dtype="f4").reshape(10, 2)
    rig.create(dict.fromkeys(range(3), value))
    yield rig
    rig.gate.set()
    assert await rig.service.drain()


def entry(key=5, shape=(4, 2), whole=(10, 2), offset=(6, 0), dtype="float32"):
    return InitialEntry(
        key, f"part {key}", True, True, dtype, list(shape), list(whole), list(offset)
    )


async def test_a_lookup_is_answered_at_once_beside_whole_values(rig):
    ids = (np.array([9, 1]), np.array([], "i4"))
    pulled = rig.ask(
        PullRows(SESSION, [Read(2, 0), Read(0, -1)], [1, 0], ids), rig.worker
    )
    assert isinstance(pulled, Pulled)
    assert pulled.versions == [0, 0]
    value, rows, none = pulled.arrays
    assert value.shape == (10, 2)  # and the reader knows version 0 of the other one
    assert rows.tolist() == [[18, 19], [2, 3]]
    assert none.shape == (0, 2)
    with pytest.raises(InvalidArgumentError, match=r"'t1'.*\[0, 10\).*\b10\b"):
        rig.ask(PullRows(SESSION, [], [1], (np.array([10]),)), rig.worker)


def tell(key: int):
    """That optimizer 1 moves a variable."""
    tree = {"w": ((key,), (10, 2), "f4")}
    return message(SESSION, 1, binding(optax.sgd(0.5), tree))


async def test_a_large_lookup_goes_to_the_thread_and_sees_no_later_push(
    rig, monkeypatch
):
    monkeypatch.setattr(requests_module, "INLINE", 0)
    rig.gate.clear()
    held_up = rig.ask(CreateOptimizer(SESSION, 1, "sgd", b"sgd"))
    told = rig.ask(tell(1))
    rows = rig.ask(PullRows(SESSION, [], [1], (np.array([3]),)))
    heads = [Update(1, int(UpdateOp.OPTIMIZE_ROWS), 1, 2)]
    pushed = rig.ask(
        Push(SESSION, 1, 0, 0, heads, (np.array([3]), np.ones((1, 2), "f4")))
    )
    after = rig.ask(PullRows(SESSION, [], [1], (np.array([3]),)))
    other = rig.ask(Pull(SESSION, [Read(2, -1)]))
    assert isinstance(other, Pulled)  # another variable does not wait
    assert not any(x.done() for x in (held_up, rows, pushed, after))
    rig.gate.set()
    assert await held_up == await told == Done()
    assert (await rows).arrays[0].tolist() == [[6, 7]]
    assert (await pushed).applied
    assert (await after).arrays[0].tolist() == [[5.5, 6.5]]


async def test_small_compiled_pushes_of_rows_are_applied_on_the_spot(rig):
    await rig.answer(CreateOptimizer(SESSION, 1, "sgd", b"sgd"))
    await rig.answer(tell(1))

    def push(*ids):
        arrays = (np.array(ids), np.ones((len(ids), 2), "f4"))
        heads = [Update(1, int(UpdateOp.OPTIMIZE_ROWS), 1, 2)]
        return rig.ask(Push(SESSION, -1, 0, 0, heads, arrays), rig.worker)

    assert asyncio.isfuture(first := push(1, 2))  # compiles
    assert (await first).applied
    assert push(1, 2).applied
    assert asyncio.isfuture(mixed := push(2, 1, 2))  # must be sorted first
    assert (await mixed).versions == [3]
    pulled = rig.ask(PullRows(SESSION, [], [1], (np.array([1, 2]),)))
    assert pulled.arrays[0].tolist() == [[0.5, 1.5], [2, 3]]


async def test_initial_values_are_made_for_a_part(rig):
    new = [entry(5), entry(6, (6, 2), offset=(0, 0), dtype="bfloat16")]
    assert await rig.answer(InitializeVariables(SESSION, new, b"counted")) == Done()
    # The same again has nothing to do, whatever the code.
    assert await rig.answer(InitializeVariables(SESSION, new, b"broken")) == Done()
    pulled = rig.ask(Pull(SESSION, [Read(5, -1), Read(6, -1)]))
    last, first = pulled.arrays
    assert last.tolist() == [[12, 13], [14, 15], [16, 17], [18, 19]]
    assert first.dtype == ml_dtypes.bfloat16
    assert first.astype(int).ravel().tolist() == list(range(12))
    names = rig.ask(Inspect()).values["variables"]
    assert names == 5


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            b"wrong shape",
            r"was asked for float32\[4, 2\] and returned float32\[10, 2\]",
        ),
        (b"wrong dtype", r"was asked for float32\[4, 2\] and returned float64\[4, 2\]"),
        (b"no callable", "is 5: not a callable"),
        (b"broken", "failed for .*: ZeroDivisionError: no seed"),
    ],
)
async def test_what_an_initializer_does_wrong_is_said_and_nothing_is_created(
    rig, code, words
):
    with pytest.raises(
        InvalidArgumentError, match=f"the initializer of variable 'part 5' {words}"
    ):
        await rig.answer(InitializeVariables(SESSION, [entry(5)], code))
    assert rig.ask(Inspect()).values["variables"] == 3


async def test_what_cannot_be_created_is_refused_before_code_is_loaded(rig):
    with pytest.raises(InvalidArgumentError):
        rig.ask(InitializeVariables(SESSION, [entry(5), entry(5)], b"counted"))
    with pytest.raises(AlreadyExistsError, match=r"\b1\b.*'t1'.*\[10, 2\]"):
        rig.ask(InitializeVariables(SESSION, [entry(1)], b"counted"))
    with pytest.raises(ProtocolError, match="'object'"):
        rig.ask(InitializeVariables(SESSION, [entry(5, dtype="object")], b"counted"))
    with pytest.raises(PermissionDeniedError, match="InitializeVariables"):
        rig.ask(InitializeVariables(SESSION, [entry(5)], b"counted"), rig.worker)


async def test_a_large_value_is_taken_over_unless_the_initializer_keeps_it(rig):
    shape = (70_000, 4)
    big = [entry(5, shape, shape, (0, 0)), entry(6, shape, shape, (0, 0))]
    for new, code in zip(big, (b"fresh", b"keeping"), strict=True):
        await rig.answer(InitializeVariables(SESSION, [new], code))
    kept[-1][:] = 7  # of no consequence
    fresh, copied = rig.ask(Pull(SESSION, [Read(5, -1), Read(6, -1)])).arrays
    assert (fresh == 1).all()
    assert not copied.any()
    assert not fresh.flags.writeable
