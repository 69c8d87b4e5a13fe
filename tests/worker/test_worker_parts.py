"""The small parts: layouts, kept results, tracebacks, the executor thread."""

from __future__ import annotations

import asyncio
import threading
import traceback

import jax
import numpy as np
import pytest

from zstrat import errors
from zstrat.config import Limits
from zstrat.data import Elements
from zstrat.errors import NotFoundError
from zstrat.program import ResultLayout, StepResult, function, prepare, trim
from zstrat.wire import Outcome
from zstrat.worker import Executor
from zstrat.worker._closure import ResultLayouts, failed
from zstrat.worker._reports import Results


def result(layout, *leaves):
    return StepResult([np.asarray(leaf) for leaf in leaves], layout, [])


def test_layouts_are_numbered_once_by_identity_or_value():
    layouts = ResultLayouts(Limits(inline=100))
    scalar = ResultLayout(("float32",), ((),), 0)
    twin = ResultLayout(("float32",), ((),), 0)
    other = ResultLayout(("float32",), ((2,),), 0)
    numbers = [
        layouts.ok(step, result(layout, np.zeros(shape, np.float32))).completion.layout
        for step, (layout, shape) in enumerate(
            [(scalar, ()), (other, (2,)), (twin, ()), (scalar, ())]
        )
    ]
    assert numbers == [1, 2, 1, 1]
    assert len(layouts) == 2


def test_small_results_are_bytes_and_large_ones_stay():
    layouts = ResultLayouts(Limits(inline=16))
    pair = ResultLayout(("int32", "int8"), ((2,), ()), ["(", 0, 1])
    ending = layouts.ok(
        1, result(pair, np.array([[1, 9], [2, 9]], np.int32)[:, 0], np.int8(3))
    )
    assert ending.data == b"\1\0\0\0\2\0\0\0\3"
    assert (ending.completion.size, ending.kept) == (9, None)
    large = ResultLayout(("float64",), ((3,),), 0)
    ending = layouts.ok(2, result(large, np.zeros(3)))
    assert (ending.completion.size, ending.data) == (-1, b"")
    assert ending.kept is not None
    empty = ResultLayout((), (), None)
    assert layouts.ok(3, result(empty)).completion[1:4] == (Outcome.OK, 3, 0)


def test_layouts_of_eager_steps_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("zstrat.worker._closure._REMEMBERED", 3)
    layouts = ResultLayouts(Limits(inline=16))
    numbers = [
        layouts.ok(n, result(ResultLayout((), (), ["=", n]))).completion.layout
        for n in range(10)
    ]
    assert numbers == list(range(1, 11))
    assert len(layouts._by_value) <= 3


def test_kept_results_are_bounded_and_say_what_became_of_them():
    results = Results(limit=100)
    for step in range(4):
        results.keep(step, [np.zeros(5)])
    assert (len(results), results.nbytes) == (2, 80)
    with pytest.raises(NotFoundError, match="MiB"):
        results.of(1)
    results.keep(9, [np.zeros(1000)])  # larger than the bound: the newest stays
    assert (len(results), results.of(9)[0].size) == (1, 1000)
    results.keep(9, [np.zeros(2)])
    assert results.nbytes == 16
    results.drop([9, 10])
    with pytest.raises(NotFoundError):
        results.of(9)
    assert results.nbytes == 0


def users_function(x):
    return x.reshape(3, 5)  # here


def test_tracebacks_keep_the_users_lines():
    with pytest.raises(TypeError) as raised:
        jax.eval_shape(users_function, np.zeros(4))
    error = trim(raised.value)
    words = "".join(traceback.format_exception(error))
    assert "JAX_TRACEBACK_FILTERING" not in words, "the variable is ZSTRAT_TRACEBACK"
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert files == [__file__, __file__]


def test_a_refusal_of_ours_has_no_traceback_of_ours():
    """Its words are for the user, and none of the lines are."""
    with pytest.raises(NotFoundError) as raised:
        Results(1000).of(9)
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    assert trim(error).__traceback__ is None


def users_branch(x):
    return x if x > 0 else -x


def users_step(x):
    return users_branch(x)


def test_a_refusal_of_ours_comes_with_the_users_lines_of_its_cause():
    """Its words name the last of them only."""
    with pytest.raises(TypeError) as raised:
        prepare(function(users_step), (np.float32(1),), {})
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    _, _, notes, _ = failed(1, error).completion.error
    assert "return users_branch(x)" in notes
    assert "_refusals.py" not in notes


def test_the_cause_of_a_refusal_that_has_no_line_of_the_user_is_not_told():
    with pytest.raises(TypeError) as raised:
        Elements(3)
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    _, _, notes, _ = failed(1, error).completion.error
    assert notes == ""


def test_tracebacks_of_our_own_defects_stay_whole():
    try:
        trim(3)
    except AttributeError as error:
        error.__traceback__ = error.__traceback__.tb_next
        trim(error)
        (frame,) = traceback.extract_tb(error.__traceback__)
        assert frame.filename.endswith("_tracebacks.py")


def test_chains_of_errors_are_trimmed_and_may_be_loops():
    first, second = ValueError("first"), KeyError("second")
    first.__context__, second.__context__ = second, first
    assert trim(first) is first


def test_errors_on_the_wire_have_a_bounded_length():
    wire = failed(1, ValueError("a" * 100_000 + "z", 2**100)).completion.error
    error = errors.from_wire(wire)
    assert len(str(error)) < 10_000
    assert str(error.args[0]).endswith("z")


# The thread


@pytest.fixture
async def executor():
    crashes = []
    executor = Executor("test", on_crash=crashes.append)
    yield executor
    assert await executor.close(20)
    assert not crashes


async def test_jobs_run_in_order_on_one_thread(executor):
    ran = []
    futures = [
        executor.submit(lambda i=i: ran.append((i, threading.current_thread().name)))
        for i in range(5)
    ]
    await asyncio.gather(*futures)
    assert [i for i, _ in ran] == list(range(5))
    assert {name for _, name in ran} == {"zstrat executor test"}


async def test_errors_of_jobs_go_to_their_futures(executor):
    def stop():
        raise StopIteration("x")

    with pytest.raises(ZeroDivisionError):
        await executor.submit(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await executor.submit(stop)
    with pytest.raises(SystemExit):
        await executor.submit(lambda: exec("raise SystemExit(3)"))
    assert await executor.submit(lambda: 5) == 5


async def test_a_cancelled_job_still_runs(executor):
    began, go_on, ran = threading.Event(), threading.Event(), []

    def job():
        began.set()
        assert go_on.wait(100)
        ran.append(1)

    future = executor.submit(job)
    await asyncio.get_running_loop().run_in_executor(None, began.wait, 20)
    future.cancel()
    go_on.set()
    await executor.submit(lambda: None)
    assert ran == [1]


async def test_closing_does_not_wait_for_ever():
    go_on = threading.Event()
    executor = Executor("stuck", on_crash=lambda error: None)
    executor.tell(lambda: go_on.wait(100))
    assert await executor.close(0.0) is False
    go_on.set()
    assert await executor.close(20) is True
