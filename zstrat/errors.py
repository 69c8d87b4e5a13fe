"""All errors that zstrat defines, in one class hierarchy.

The type of an error says who caused it and whether a retry can help; its fields name
the peer, the object, the expected and the received value. Misuse of the API raises
Python's ValueError, TypeError, RuntimeError and IndexError, as in TensorFlow.

Between tasks an error is sent as a code and plain fields (`to_wire`, `from_wire`),
never as a pickle. ``cls(*error.args)`` rebuilds the error, so the constructor of each
class takes exactly its fields, positionally.
"""

from __future__ import annotations

import dis
import os
import reprlib
import sys
import traceback
from types import ModuleType
from typing import ClassVar, Final

PlainField = None | bool | int | float | str | bytes
"""The types of fields that can be sent to another task."""

_BY_CODE: Final[dict[int, type[ZstratError]]] = {}


class ZstratError(Exception):
    """Base class of all errors of zstrat; ``args`` are its fields."""

    code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without a change to the program."""

    def __init_subclass__(cls) -> None:
        # A subclass without a code is sent as its base class.
        if "code" in cls.__dict__:
            other = _BY_CODE.setdefault(cls.code, cls)
            if other is not cls:
                raise TypeError(f"wire code {cls.code} is used by {other.__name__}")


# `__init_subclass__` is not called for the base class itself.
_BY_CODE[ZstratError.code] = ZstratError


class ProtocolError(ZstratError):
    """The peer sent a message that violates the protocol."""

    code = 2


class VersionMismatchError(ProtocolError):
    """The peer has an incompatible version of the protocol or of a package."""

    code = 3


class PermissionDeniedError(ZstratError):
    """The key of the caller does not have the role that the request requires."""

    code = 4


class ClosedError(ZstratError):
    """The caller used an object after closing it."""

    code = 5


class ForkedError(ClosedError):
    """The object was made by the parent of this forked process.

    Its threads and connections exist only in the parent. Start processes with "spawn"
    or "forkserver", or make the object in the process that uses it.
    """

    code = 34

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what}: this process was forked from the connected process and does "
            "not have its threads: use multiprocessing's 'spawn' or 'forkserver', or "
            "create the strategy (the group, the port) in this process"
        )


class PeerLostError(ZstratError):
    """The peer ended or its connection broke; the request may or may not have been
    executed.

    ``left``: the peer closed the connection on purpose. ``returns``: seconds within
    which, as the peer announced, a new process with its state will serve; 0 if none
    will.
    """

    code = 6
    retryable = True

    def __init__(
        self, peer: str, reason: str, left: bool = False, returns: float = 0.0
    ) -> None:
        super().__init__(peer, reason, left, *([returns] if returns else ()))
        self.peer, self.reason, self.left = peer, reason, left
        self.returns = returns

    def __str__(self) -> str:
        return f"lost {self.peer}: {self.reason}"


class WorkerLostError(PeerLostError):
    """A worker was lost; its closures are scheduled on other workers automatically."""

    code = 7


class UnavailableError(ZstratError):
    """A task that the call needs cannot be reached."""

    code = 8
    retryable = True


_START_OVER: Final = (
    "start it if it does not run, create a new strategy and its variables, and restore "
    "a checkpoint"
)


class PSUnavailableError(UnavailableError):
    """A parameter server cannot be reached, or its variables are lost.

    ``lost``: the variables are certainly lost. Start the server if it does not run,
    create a new strategy and its variables, and restore the last checkpoint. Otherwise
    the server may only be disconnected, and calls succeed again when it is back.
    """

    code = 9

    def __init__(self, task: str, reason: str, lost: bool = False) -> None:
        super().__init__(task, reason, lost)
        self.task, self.reason, self.lost = task, reason, lost

    def __str__(self) -> str:
        if self.lost:
            return (
                f"{self.task} is unavailable: {self.reason}; its variables are lost: "
                f"{_START_OVER}"
            )
        return (
            f"{self.task} is unavailable: {self.reason}; if it is only disconnected, "
            "calls succeed again when it is back, and requests in flight may or may "
            f"not have run; if it has ended, {_START_OVER}"
        )


class CancelledError(ZstratError):
    """The closure was cancelled before it finished. Scheduling it again is possible."""

    code = 10


class DeadlineExceededError(ZstratError, TimeoutError):
    """The call did not finish before its deadline."""

    code = 11
    retryable = True


class OutOfRangeError(ZstratError):
    """The dataset has no more elements."""

    code = 12


class NotFoundError(ZstratError):
    """A variable, function, optimizer or resource of this name does not exist."""

    code = 13


class AlreadyExistsError(ZstratError):
    """A different variable, optimizer or file of this name exists already."""

    code = 14


class InvalidArgumentError(ZstratError, ValueError):
    """A value with the wrong shape, dtype or range was sent to another task."""

    code = 15


class StaleSessionError(ZstratError):
    """The request is of a coordinator whose session with this task has ended."""

    code = 16


class BusyError(ZstratError):
    """The task serves another live coordinator, or a bounded queue is full."""

    code = 17
    retryable = True


class HeldError(BusyError):
    """The task serves another coordinator, which is certainly alive as it sent a
    message just now."""

    code = 33


class CollectiveTimeoutError(DeadlineExceededError):
    """A rank did not join a collective operation in time."""

    code = 18


class StepError(ZstratError):
    """A step function raised an exception of a class that this process has not
    imported.

    Other exceptions are raised with their own class, and with the worker's traceback as
    a note.
    """

    code = 19

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name, self.message = type_name, message

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


class ClosureInputError(ZstratError):
    """An input of the closure, such as its dataset iterator, could not be created.

    ``original_exception`` is the root cause.
    """

    code = 20

    def __init__(self, message: str, original: BaseException | None = None) -> None:
        super().__init__(message)
        if isinstance(original, ClosureInputError) and original.original_exception:
            original = original.original_exception  # itself a root: wrapped only once
        self.original_exception: BaseException | None = original

    def __str__(self) -> str:
        what = self.original_exception
        text = str(self.args[0])
        return text if what is None else f"{text}: {type(what).__name__}: {what}"


class ClosureAbortedError(ClosureInputError):
    """A per-worker resource was lost with its worker; the resource is rebuilt when the
    worker returns."""

    code = 21


class DataLossError(ZstratError):
    """A file is truncated, corrupted, or was not written by zstrat.

    ``tensor`` is "" if the whole file is affected.
    """

    code = 22

    def __init__(self, file: str, tensor: str, reason: str) -> None:
        super().__init__(file, tensor, reason)
        self.file, self.tensor, self.reason = file, tensor, reason

    def __str__(self) -> str:
        where = f"{self.file}: tensor {self.tensor!r}" if self.tensor else self.file
        return f"{where}: {self.reason}"


class ResourceExhaustedError(ZstratError):
    """A disk or a quota is full."""

    code = 23
    retryable = True


class RetryDiffersError(ZstratError):
    """An eager step that was repeated after its worker was lost made different updates
    than the first time.

    The update ``before``, from the first run, remains; the update ``now``, from the
    second run, was refused.
    """

    code = 30

    def __init__(self, step: int, before: str, now: str) -> None:
        super().__init__(step, before, now)
        self.step, self.before, self.now = step, before, now

    def __str__(self) -> str:
        return (
            f"step {self.step} was repeated and made a different update. Applied by "
            f"the first run, and kept: {self.before}. Made by this run, and refused: "
            f"{self.now}. An eager step must be deterministic: make its updates after "
            "all reads, or omit eager=True"
        )


class ResultLostError(ZstratError):
    """The result of a step was lost with its worker after the step may have applied
    updates; scheduling the step again may apply these updates twice."""

    code = 31

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(step, reason)
        self.step, self.reason = step, reason

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"


class NotPrimaryError(UnavailableError):
    """This process has a copy of the variables (``replicas=1``) but does not serve them
    now; the coordinator decides which process does."""

    code = 32


WireError = list[object]
"""An error as it is sent to other tasks: ``[code, [field, ...], notes, cause]``, or for
an exception that zstrat does not define ``[0, [module, qualname, message, args], notes,
None]``."""


_MAX_FIELD_LENGTH: Final = 8000
"""Characters of a text or bytes field that are sent, so that many errors fit into one
message, even if they print arrays."""
_HERE: Final = f"{os.path.dirname(__file__)}/"
_LIBRARY: Final = (f"{os.path.dirname(os.__file__)}/", "<frozen")
_MAX_FIELDS: Final = 16
"""Number of fields that are sent; errors of zstrat and Python have at most five."""


def to_wire(error: BaseException, *, full: bool = True) -> WireError:
    """Converts an error to plain values that a message can contain; its traceback
    becomes a note.

    Unless ``full``, an error that a ``raise`` of zstrat made is sent without its
    traceback if that has no line of the user. Long texts lose their middle, so that the
    result fits into a message.
    """
    wire = _to_plain(error, full)
    if isinstance(error, ClosureInputError) and error.original_exception is not None:
        wire[3] = _to_plain(error.original_exception, full)
    return wire


def from_wire(wire: object) -> Exception:
    """Converts the plain values that `to_wire` made back to an error.

    Never raises: an unknown code or class becomes a generic error. No module is
    imported and no code from the peer runs: a foreign exception class is used only if
    this process has imported it already.
    """
    error = _from_plain(wire)
    if isinstance(error, ClosureInputError):
        match wire:
            case [_, _, _, list() as root]:  # causes are not nested
                error.original_exception = _from_plain(root)
    return error


def is_refusal(error: BaseException) -> bool:
    """Returns whether a ``raise`` of zstrat made the error, so that its message is for
    the user, and its traceback is not; an ``assert`` does not count."""
    trace = error.__traceback__
    if trace is None or isinstance(error, AssertionError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    opcode = dis.opname[code.co_code[trace.tb_lasti]]
    return opcode == "RAISE_VARARGS" and code.co_filename.startswith(_HERE)


def _is_of_zstrat_alone(error: BaseException) -> bool:
    """Returns whether the error is a refusal whose traceback has no line of the user,
    whose code may have made the call that was refused."""
    if not is_refusal(error):
        return False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        # Handlers run in thread pools, and some through jax.
        is_library = file.startswith(_LIBRARY) and "/site-packages/" not in file
        is_library = is_library or "/site-packages/jax" in file
        if not (file.startswith(_HERE) or is_library):
            return False
    return True


def _to_plain(error: BaseException, full: bool) -> WireError:
    cause = error.__cause__
    hides = not full and isinstance(error, ZstratError) and _is_of_zstrat_alone(error)
    hides = hides and (cause is None or _is_of_zstrat_alone(cause))
    # `trim` has left a refusal without lines of its own, but those of the user in its
    # cause are where the user has to look.
    has_lines = error.__traceback__ is not None
    if full and cause is not None:
        has_lines = has_lines or cause.__traceback__ is not None
    if hides or not has_lines:
        notes = _notes(error)
    else:  # includes the notes
        notes = "".join(traceback.format_exception(error))
    notes = _shortened(notes)
    fields: list[object] = [_plain(field) for field in error.args[:_MAX_FIELDS]]
    if isinstance(error, ZstratError):
        return [error.code, fields, notes, None]
    names = [_shortened(type(error).__module__), _shortened(type(error).__qualname__)]
    return [0, [*names, _words(error), fields], notes, None]


def _from_plain(wire: object) -> Exception:
    match wire:
        case [0, [str(module), str(name), str(message), list(fields)], str(notes), _]:
            error = _foreign(module, name, message, fields)
        case [int(code), list(fields), str(notes), _]:
            error = _own(code, fields)
        case _:
            what = reprlib.repr(wire)
            return ProtocolError(f"received a malformed error: {what}")
    if notes:
        error.add_note(f"\nTraceback of the other task:\n{notes}")
    return error


def _own(code: int, fields: list[object]) -> Exception:
    cls = _BY_CODE.get(code)
    if cls is None:
        return ZstratError(f"error code {code} of a newer zstrat: {_short(fields)}")
    words = f"received {cls.__name__} with unexpected fields: {_short(fields)}"
    if issubclass(cls, ClosureInputError) and len(fields) != 1:
        return ProtocolError(words)  # its second argument is not a field
    try:
        error = cls(*fields)
    except TypeError:  # a newer or hostile peer sent other fields
        return ProtocolError(words)
    return error if _is_readable(error) else ProtocolError(words)


def _foreign(module: str, name: str, message: str, fields: list[object]) -> Exception:
    unknown = StepError(f"{module}.{name}", message)
    scope = sys.modules.get(module)
    # Not getattr, which may import modules or run code of the module.
    cls = scope.__dict__.get(name) if isinstance(scope, ModuleType) else None
    if not isinstance(cls, type) or not issubclass(cls, Exception):
        return unknown
    if issubclass(cls, StopIteration | StopAsyncIteration):
        return unknown  # futures and coroutines cannot raise it
    try:
        error: object = cls(*fields)
    except Exception:  # its constructor has other arguments: StepError instead
        return unknown
    if not isinstance(error, Exception) or not _is_readable(error):
        return unknown
    return error


def _is_readable(error: Exception) -> bool:
    """Returns whether the error can be converted to text, which fails for some fields
    of wrong types."""
    try:
        return isinstance(str(error), str) and isinstance(repr(error), str)
    except Exception:  # any error of a foreign class: the error is not used
        return False


def _short(fields: list[object]) -> str:
    return ", ".join(map(reprlib.repr, fields[:_MAX_FIELDS])) or "none"


def _words(error: BaseException) -> str:
    try:
        return _shortened(str(error))
    except Exception as why:  # of a user's class: its name and traceback are sent
        return f"(str() of this error raised {type(why).__name__})"


def _notes(error: BaseException) -> str:
    try:
        return "".join(map(str, getattr(error, "__notes__", ())))
    except Exception:  # users may set them to anything: only the traceback is sent
        return ""


def _shortened(text: str) -> str:
    if len(text) <= _MAX_FIELD_LENGTH:
        return text
    half = _MAX_FIELD_LENGTH // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


def _plain(field: object) -> PlainField:
    match field:
        case None | bool() | float():
            return field
        case int() if -(2**63) <= field < 2**63:
            return field
        case bytes():
            return field[:_MAX_FIELD_LENGTH]
        case str():
            return _shortened(field)
    try:
        return _shortened(str(field))
    except Exception:  # of a user's class: only its name is sent
        return f"<{type(field).__name__}>"
