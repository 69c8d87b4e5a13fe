"""Tracebacks of steps show the user's lines; a setting shows zstrat's, too."""

import traceback

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs
from zstrat.variables import Variable

NOTE = "ZSTRAT_TRACEBACK=full shows them"


def function_names(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def raised(step, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        step(*args)
    return caught.value


@zs.function
def other_shapes(x):
    return Variable(np.zeros(8, np.float32)) + x


@zs.function
def branch(x):
    return x if x > 0 else -x


@zs.function(eager=True)
def eager(x):
    return 1 / int(jnp.sum(x) * 0)


@pytest.mark.parametrize("step", [other_shapes, eager])
def test_the_lines_of_the_user(step):
    error = raised(step, np.zeros(3, np.float32))
    assert function_names(error) == ["raised", step.__name__]
    assert NOTE in error.__notes__[-1]


def test_causes_too():
    error = raised(branch, 1.0)
    assert function_names(error) == ["raised"]
    assert function_names(error.__cause__) == ["branch"]
    assert len(traceback.format_exception(error)) <= 10


def test_an_error_that_is_raised_again_says_so_once():
    error = ValueError("own")

    @zs.function
    def step():
        raise error

    assert raised(step) is raised(step) is error
    assert sum(NOTE in note for note in error.__notes__) == 1


def test_notes_that_are_not_a_list_stay():
    error = ValueError("own")
    error.__notes__ = 3

    @zs.function(eager=True)
    def step():
        raise error

    assert raised(step) is error


def test_all_frames(monkeypatch):
    monkeypatch.setenv("ZSTRAT_TRACEBACK", "full")
    error = raised(branch, 1.0)
    assert len(function_names(error)) > 3
    assert not hasattr(error, "__notes__") or NOTE not in "".join(error.__notes__)


def test_exceptions_that_stop_the_program_keep_their_frames():
    @zs.function
    def step():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        step()
    assert "run_here" in function_names(caught.value)


def test_frames_of_functions_that_the_user_calls_stay():
    @zs.function
    def step():
        return np.loadtxt("/nowhere")

    names = function_names(raised(step))
    assert names[:3] == ["raised", "step", "loadtxt"]
