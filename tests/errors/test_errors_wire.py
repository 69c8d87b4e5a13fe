"""Errors cross the wire as plain values, and whatever arrives becomes an exception."""

from __future__ import annotations

import asyncio
import copy
import enum
import inspect
import pickle
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat import errors
from zstrat.config import Limits
from zstrat.errors import (
    ClosureAbortedError,
    ClosureInputError,
    OutOfRangeError,
    ProtocolError,
    PSUnavailableError,
    StepError,
    ZstratError,
    from_wire,
    to_wire,
)
from zstrat.wire import Failure, decode, encode

LIMITS = Limits()


def tree():
    """Every class of the tree that the module defines."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [cls for cls in classes if issubclass(cls, ZstratError)]


def made(cls):
    """One of them, with a different value for each field that its constructor takes."""
    if not inspect.isfunction(cls.__init__) or issubclass(cls, ClosureInputError):
        return cls("what happened")
    parameters = inspect.signature(cls).parameters.values()
    return cls(
        *[0.5 if "float" in str(p.annotation) else f"the {p.name}" for p in parameters]
    )


def across(error):
    """What arrives when a task sends the error, through header and limits."""
    header, arrays = encode(Failure(to_wire(error)), 7)
    assert not arrays
    _, message = decode(header, [], LIMITS)
    return from_wire(message.error)


def fields(error):
    return {k: v for k, v in vars(error).items() if k != "__notes__"}


@pytest.mark.parametrize("cls", tree())
def test_every_error_arrives_as_itself(cls):
    error = made(cls)
    arrived = across(error)
    assert type(arrived) is cls
    assert arrived.args == error.args
    assert fields(arrived) == fields(error)
    assert str(arrived) == str(error)


@pytest.mark.parametrize("cls", tree())
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_every_error_is_copied_and_pickled_as_itself(cls, copied):
    error = made(cls)
    again = copied(error)
    assert (type(again), again.args) == (cls, error.args)
    assert fields(again) == fields(error)
    assert str(again) == str(error)


def refusal():
    """Of zstrat, as zstrat catches it: without our frame."""
    with pytest.raises(ZstratError) as raised:
        decode(b"x", [], LIMITS)
    return raised.value.with_traceback(raised.value.__traceback__.tb_next)


def test_a_refusal_of_ours_comes_without_a_traceback_of_ours():
    """The message is for the user, and none of the lines are."""
    refused = refusal()
    assert not hasattr(from_wire(to_wire(refused, full=False)), "__notes__")
    (note,) = from_wire(to_wire(refused)).__notes__
    assert "zstrat/wire/" in note


def test_a_refusal_below_a_line_of_the_user_comes_with_it():
    """An initializer of theirs, say, that calls zstrat."""
    with pytest.raises(ZstratError) as raised:
        decode(b"the user's", [], LIMITS)
    (note,) = from_wire(to_wire(raised.value, full=False)).__notes__
    assert "the user's" in note
    wrapped = refusal()
    wrapped.__cause__ = raised.value
    (note,) = from_wire(to_wire(wrapped, full=False)).__notes__
    assert "the user's" in note


@pytest.mark.parametrize("lost", [False, True])
def test_a_lost_server_needs_a_new_strategy(lost):
    """A server that was started again does not serve the strategy that it left."""
    words = str(PSUnavailableError("/job:ps/task:0", "it broke", lost))
    assert "if it does not run, create a new strategy and its variables" in words


def test_codes_are_unique_and_stay():
    codes = {cls.code: cls for cls in tree()}
    assert len(codes) == len(tree())
    # Another version of zstrat reads them: these never change.
    assert [codes[n].__name__ for n in (1, 2, 3, 6, 9, 15, 19, 20)] == [
        *("ZstratError", "ProtocolError", "VersionMismatchError", "PeerLostError"),
        *("PSUnavailableError", "InvalidArgumentError"),
        *("StepError", "ClosureInputError"),
    ]
    with pytest.raises(TypeError, match=r"\b2\b.*ProtocolError"):
        type("Other", (ZstratError,), {"code": 2})


def test_errors_are_pythons_own_where_python_has_one():
    assert issubclass(errors.InvalidArgumentError, ValueError)
    assert issubclass(errors.DeadlineExceededError, TimeoutError)
    # Cancelling a closure must never look like cancelling the task that waits for it.
    assert not issubclass(errors.CancelledError, asyncio.CancelledError)


def test_a_code_of_a_newer_zstrat_is_said():
    error = from_wire([9999, ["a", 2], "", None])
    assert type(error) is ZstratError
    assert "9999 of a newer zstrat" in str(error)
    assert "'a', 2" in str(error)


@pytest.mark.parametrize(
    ("cls", "count"),
    [
        (PSUnavailableError, 0),
        (PSUnavailableError, 4),
        (StepError, 1),
        (ClosureInputError, 0),
        (ClosureInputError, 2),
        (ClosureAbortedError, 2),
    ],
)
def test_other_fields_than_ours_are_said(cls, count):
    error = from_wire([cls.code, ["x"] * count, "", None])
    assert type(error) is ProtocolError
    assert f"received {cls.__name__} with unexpected fields" in str(error)


class Picky(Exception):
    """Wants something else than its ``args``."""

    def __init__(self, *, reason):
        super().__init__(f"because of {reason}")


class Mute(Exception):
    def __str__(self):
        raise KeyError("no words")


class Strange(Exception):
    """Makes something that is no exception."""

    def __new__(cls, *args):
        return super().__new__(cls) if len(args) == 2 else object()

    def __init__(self, first, second):
        super().__init__(first)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 3, None, 2.5, True, b"raw"),
        KeyError("k"),
        OSError(2, "no such file"),
        ZeroDivisionError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        np.exceptions.AxisError("axis 3 is out of bounds"),  # imported here
    ],
)
def test_an_exception_that_this_process_knows_arrives_as_itself(error):
    arrived = across(error)
    assert (type(arrived), arrived.args) == (type(error), error.args)
    assert str(arrived) == str(error)


def test_a_class_that_is_not_imported_here_is_not_imported():
    assert "this.module.is.nowhere" not in sys.modules
    wire = [0, ["this.module.is.nowhere", "Boom", "it broke", ["it broke"]], "", None]
    error = from_wire(wire)
    assert type(error) is StepError
    assert (error.type_name, error.message) == (
        "this.module.is.nowhere.Boom",
        "it broke",
    )
    assert str(error) == "this.module.is.nowhere.Boom: it broke"


def test_a_module_that_loads_names_when_asked_is_not_asked(monkeypatch):
    def load(name):
        raise AssertionError(f"asked for {name}")

    lazy = ModuleType("lazy_module")
    lazy.__getattr__ = load
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    error = from_wire([0, ["lazy_module", "Boom", "m", []], "", None])
    assert str(error) == "lazy_module.Boom: m"


@pytest.mark.parametrize("error", [Picky(reason="rain"), Strange("at", "home")])
def test_a_constructor_that_wants_something_else(error):
    arrived = across(error)
    assert type(arrived) is StepError
    assert arrived.type_name == f"{__name__}.{type(error).__name__}"
    assert arrived.message == str(error)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("k"), SystemExit(3), asyncio.CancelledError("c")]
)
def test_what_would_end_the_program_arrives_as_a_step_error(error):
    arrived = across(error)
    assert type(arrived) is StepError
    assert arrived.message == str(error)


@pytest.mark.parametrize("cls", [StopIteration, StopAsyncIteration])
async def test_what_ends_a_loop_arrives_as_something_that_a_future_can_carry(cls):
    arrived = across(cls("the end"))
    future = asyncio.get_running_loop().create_future()
    future.set_exception(arrived)
    with pytest.raises(StepError, match=f"{cls.__name__}: the end"):
        await future


@pytest.mark.parametrize(
    "name", ["print", "BaseException", "int", "__name__", "Missing", "", "a.b"]
)
def test_a_name_that_is_no_exception_class(name):
    error = from_wire([0, ["builtins", name, "m", ["never printed"]], "", None])
    assert (type(error), error.message) == (StepError, "m")


class Depth(enum.IntEnum):
    SHALLOW = 3


def test_fields_become_plain_values():
    error = ValueError(2**100, -(2**70), Depth.SHALLOW, np.int64(5), [1, 2], Mute())
    arrived = across(error)
    assert type(arrived) is ValueError
    assert arrived.args == (str(2**100), str(-(2**70)), 3, "5", "[1, 2]", "<Mute>")


def test_an_error_without_words_is_sent_all_the_same():
    arrived = from_wire(to_wire(Mute("x")))
    assert type(arrived) is StepError  # which has words: that its own cannot be had
    assert "KeyError" in str(arrived)
    module, name, message, _ = to_wire(Mute("x"))[1]
    assert (module, name) == (__name__, "Mute")
    assert "KeyError" in message


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a" * 10**6 + "z"),
        ValueError(*range(100_000)),
        ValueError(b"b" * 10**6),
        StepError("T", "a" * 10**6 + "z"),
        ValueError(np.arange(10**6)),
    ],
)
def test_an_error_of_any_size_fits_into_a_message(error):
    arrived = across(error)
    assert type(arrived) is type(error)
    assert len(str(arrived)) < 20_000
    if str(error).endswith("z"):
        assert str(arrived).endswith("z")  # the middle is what goes


def test_a_long_traceback_fits_into_a_message():
    error = ValueError("deep")
    error.add_note("n" * 10**6)
    assert len(across(error).__notes__[0]) < 20_000


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize("cls", [ValueError, OutOfRangeError])
def test_the_traceback_arrives_as_a_note(cls):
    error = raised(cls("here"))
    error.add_note("said on the way")
    (note,) = across(error).__notes__
    assert "Traceback of the other task" in note
    assert "in raised" in note
    assert "said on the way" in note


def test_an_error_that_was_never_raised_has_no_note():
    assert not hasattr(across(ValueError("x")), "__notes__")


@pytest.mark.parametrize("cls", [ClosureInputError, ClosureAbortedError])
@pytest.mark.parametrize(
    "root",
    [ValueError("no such file"), OutOfRangeError("empty"), StepError("a.B", "c")],
)
def test_the_root_of_an_input_error_crosses_with_it(cls, root):
    error = cls("the dataset could not be built on worker:1", raised(root))
    arrived = across(error)
    assert type(arrived) is cls
    original = arrived.original_exception
    assert (type(original), original.args) == (type(root), root.args)
    assert "in raised" in original.__notes__[0]
    name = type(root).__name__
    assert str(arrived) == f"{error.args[0]}: {name}: {root}" == str(error)


def test_a_root_is_wrapped_only_once():
    root = ValueError("root")
    first = ClosureInputError("on worker:0", root)
    second = ClosureAbortedError("again", first)
    third = ClosureInputError("and again", across(second))
    assert second.original_exception is root
    assert type(third.original_exception) is ValueError
    assert across(third).original_exception.args == ("root",)
    bare = ClosureInputError("without a root")
    assert ClosureInputError("x", bare).original_exception is bare
    assert across(ClosureInputError("x", bare)).original_exception.args == bare.args


def test_a_root_is_pickled_with_its_error():
    error = ClosureInputError("on worker:0", ValueError("root"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "on worker:0: ValueError: root"
    assert again.original_exception.args == ("root",)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)
CODES = st.integers(-1, 30) | st.booleans() | PLAIN
NAMES = st.sampled_from(
    ["builtins", "zstrat", "zstrat.errors", "numpy", "sys", "os", "asyncio", "click"]
)
CLASSES = st.sampled_from(
    [
        *("OSError", "UnicodeDecodeError", "ExceptionGroup", "StopIteration", "exit"),
        *(
            "ImportError",
            "PeerLostError",
            "LocalCluster",
            "CancelledError",
            "SyntaxError",
        ),
    ]
)
FOREIGN = st.tuples(NAMES, CLASSES, st.text(), st.lists(PLAIN, max_size=6)).map(list)


@st.composite
def shaped(draw, cause=None):
    notes = st.text(max_size=5) | PLAIN
    body = draw(FOREIGN | st.lists(PLAIN, max_size=4) | PLAIN)
    return [draw(CODES), body, draw(notes), draw(PLAIN if cause is None else cause)]


@given(PLAIN | shaped() | shaped(cause=shaped(cause=shaped())))
def test_whatever_arrives_becomes_an_exception(wire):
    error = from_wire(wire)
    assert isinstance(error, Exception)
    root = getattr(error, "original_exception", None)
    assert root is None or isinstance(root, Exception)
    if isinstance(error, ZstratError):
        assert len(str(error)) < 10_000


def test_values_of_any_depth_and_size_become_an_exception():
    deep = wide = None
    for _ in range(50_000):
        deep = [20, ["m"], "", deep]
    assert isinstance(from_wire(deep), ClosureInputError)
    nested = []
    for _ in range(50_000):
        nested = [nested]
    wide = ["x" * 10**6] * 1000
    for wire in (nested, wide, [9999, nested, "", None], [6, wide, "", None]):
        error = from_wire(wire)
        assert isinstance(error, ZstratError)
        assert len(str(error)) < 10_000


@pytest.mark.parametrize("notes", [None, 5, "a note", [object()]])
def test_whatever_was_put_in_place_of_notes_the_error_travels(notes):
    error = ValueError("bad")
    error.__notes__ = notes
    arrived = from_wire(to_wire(error))
    assert type(arrived) is ValueError
    assert arrived.args == ("bad",)


class Wordy(Exception):
    """Has no text if it was given what it does not expect."""

    def __str__(self):
        return self.args[0].upper()


@pytest.mark.parametrize("fields", [[], [5], [None]])
def test_an_exception_whose_text_cannot_be_had_is_told_in_other_words(fields):
    error = from_wire([0, [__name__, "Wordy", "its words", fields], "", None])
    assert isinstance(error, StepError)
    assert str(error) == f"{__name__}.Wordy: its words"
    assert isinstance(from_wire([0, [__name__, "Wordy", "", ["a"]], "", None]), Wordy)
