"""Every error that zstrat raises by itself, in one tree.

The type says who is to blame and whether trying again can help; the fields say
which peer, which thing, what was expected and what came. Misuse of the API raises
Python's own ValueError, TypeError, RuntimeError and IndexError, as TensorFlow does.

An error crosses the wire as a code and plain fields (`to_wire`, `from_wire`) and never
as a pickle or as a text to be searched. ``cls(*error.args)`` rebuilds any of them, so
the constructor of a subclass takes exactly its fields, positionally.
"""

from __future__ import annotations

import reprlib
import sys
import traceback
from types import ModuleType
from typing import ClassVar, Final

PlainField = None | bool | int | float | str | bytes
"""What a field of an error may be, so that it survives the wire."""

_BY_CODE: Final[dict[int, type[ZstratError]]] = {}


class ZstratError(Exception):
    """Base of every error of zstrat; the fields are ``args``."""

    code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without a change of the program."""

    def __init_subclass__(cls) -> None:
        if "code" in cls.__dict__:
            other = _BY_CODE.setdefault(cls.code, cls)
            if other is not cls:
                raise TypeError(f"wire code {cls.code} is taken by {other.__name__}")


_BY_CODE[ZstratError.code] = ZstratError


class ProtocolError(ZstratError):
    """The other side sent something that the protocol does not allow."""

    code = 2


class VersionMismatchError(ProtocolError):
    """The two sides speak different protocols, or versions that do not fit."""

    code = 3


class PermissionDeniedError(ZstratError):
    """The key of the caller does not carry the role that the request needs."""

    code = 4


class ClosedError(ZstratError):
    """*You* closed this object, then used it."""

    code = 5


class ForkedError(ClosedError):
    """The object belongs to the process that this one was forked from.

    Its threads and connections stay there. Start processes by "spawn" or "forkserver",
    or make the object in the process that uses it.
    """

    code = 34

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what}: this process was forked from the one that is connected, and "
            "has none of its threads: start it with multiprocessing's 'spawn' or "
            "'forkserver', or make the strategy (the group, the port) in this process"
        )


class PeerLostError(ZstratError):
    """The other side went away; the request may or may not have run.

    ``left``: it said goodbye, so it ended on purpose. ``returns``: seconds in which,
    as it said, a process will be there that has all that it held; 0 if none will.
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
    """A worker went away; its closures go to other workers."""

    code = 7


class UnavailableError(ZstratError):
    """A task that the call needs cannot be reached."""

    code = 8
    retryable = True


class PSUnavailableError(UnavailableError):
    """A parameter server cannot be reached, or has lost what it held.

    ``lost``: the variables on it are gone, for certain. Start it again if it does not
    run, create the variables anew and restore the last checkpoint. Otherwise it may be
    cut off, and the program goes on when it is back.
    """

    code = 9

    def __init__(self, task: str, reason: str, lost: bool = False) -> None:
        super().__init__(task, reason, lost)
        self.task, self.reason, self.lost = task, reason, lost

    def __str__(self) -> str:
        if self.lost:
            return (
                f"{self.task} is unavailable: {self.reason}; the variables on it are "
                "lost: start it again, build the program anew and restore a checkpoint"
            )
        return (
            f"{self.task} is unavailable: {self.reason}; if it is only cut off, calls "
            "succeed again when it is back, and whether it has carried out what was "
            "under way is not known; if it has ended, start it again, build the "
            "program anew and restore a checkpoint"
        )


class CancelledError(ZstratError):
    """The closure was cancelled before it ran to its end; schedule it again."""

    code = 10


class DeadlineExceededError(ZstratError, TimeoutError):
    """The call did not end within the time that it was given."""

    code = 11
    retryable = True


class OutOfRangeError(ZstratError):
    """The dataset has no more elements."""

    code = 12


class NotFoundError(ZstratError):
    """A variable, function, optimizer or resource of that name does not exist there."""

    code = 13


class AlreadyExistsError(ZstratError):
    """What is of that name exists already, and differs: a variable, an optimizer, a
    file of another program."""

    code = 14


class InvalidArgumentError(ZstratError, ValueError):
    """A value of the wrong shape, dtype or range was sent to another task."""

    code = 15


class StaleSessionError(ZstratError):
    """The request belongs to a coordinator that this task does not serve (any more)."""

    code = 16


class BusyError(ZstratError):
    """The task serves another coordinator that is alive, or a bounded queue is full."""

    code = 17
    retryable = True


class HeldError(BusyError):
    """The task serves another coordinator, which was heard just now: it is no leftover
    of one that is gone and not yet missed."""

    code = 33


class CollectiveTimeoutError(DeadlineExceededError):
    """A rank did not take part in a collective in time."""

    code = 18


class StepError(ZstratError):
    """A step function raised an exception whose class this process does not know.

    Exceptions that this process knows arrive as themselves, with the worker's
    traceback as a note.
    """

    code = 19

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name, self.message = type_name, message

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


class ClosureInputError(ZstratError):
    """A resource that the closure takes (say, its dataset iterator) could not be built.

    ``original_exception`` is the root error, however often it was handed on.
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
    """A per-worker resource went with its worker; it is rebuilt when that returns."""

    code = 21


class DataLossError(ZstratError):
    """A file is not what was written: cut short, changed, or no file of ours.

    ``tensor`` is "" where the whole file is meant.
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
    """An eager step ran again after its worker was lost, and did something else.

    ``before`` was applied by the earlier run and stays; ``now`` was not applied.
    """

    code = 30

    def __init__(self, step: int, before: str, now: str) -> None:
        super().__init__(step, before, now)
        self.step, self.before, self.now = step, before, now

    def __str__(self) -> str:
        return (
            f"step {self.step} ran again and did something else. Applied by its "
            f"earlier run, and stays: {self.before}. Done by this run, and refused: "
            f"{self.now}. An eager step may branch only by what is the same in each "
            "run: make its updates behind all reads, or leave out eager=True"
        )


class ResultLostError(ZstratError):
    """The result of a step went away with its worker, and the step has had its effect,
    or part of it, or may have had: scheduling it again applies that twice."""

    code = 31

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(step, reason)
        self.step, self.reason = step, reason

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"


class NotPrimaryError(UnavailableError):
    """Another process serves these variables by now, or not this one yet: it has a
    second copy of them (``replicas=1``), and its coordinator says who serves."""

    code = 32


WireError = list[object]
"""``[code, [field, ...], notes, cause]``, or for an exception that is not ours
``[0, [module, qualname, message, args], notes, None]``."""


_MAX_FIELD_LENGTH: Final = 8000
"""Characters of a text, bytes of a field: an error that prints an array is no larger
than another, and many fit into one message."""
_MAX_FIELDS: Final = 16
"""Fields of an exception that are sent: none of ours or of Python has over five."""


def to_wire(error: BaseException) -> WireError:
    """The error as plain values, with the traceback as a note for the other side.

    Long texts lose their middle: what this gives fits into a message.
    """
    wire = _plainly(error)
    if isinstance(error, ClosureInputError) and error.original_exception is not None:
        wire[3] = _plainly(error.original_exception)
    return wire


def from_wire(wire: object) -> Exception:
    """Inverse of `to_wire`; an unknown code or class becomes a readable error.

    Never raises. No module is imported and no code from the other side runs: a foreign
    exception class is used only if this process has imported it already.
    """
    error = _from_plain(wire)
    if isinstance(error, ClosureInputError):
        match wire:
            case [_, _, _, list() as root]:  # wrapped only once: no root of a root
                error.original_exception = _from_plain(root)
    return error


def _plainly(error: BaseException) -> WireError:
    if error.__traceback__ is None:
        notes = _notes(error)
    else:  # with the notes, at its end
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
            return ProtocolError(f"an error arrived that is no error: {what}")
    if notes:
        error.add_note(f"\nTraceback of the other task:\n{notes}")
    return error


def _own(code: int, fields: list[object]) -> Exception:
    cls = _BY_CODE.get(code)
    if cls is None:
        return ZstratError(f"error {code} of a newer zstrat: {_short(fields)}")
    words = f"{cls.__name__} arrived with the fields {_short(fields)}"
    if issubclass(cls, ClosureInputError) and len(fields) != 1:
        return ProtocolError(words)  # its second argument is no field
    try:
        error = cls(*fields)
    except TypeError:  # a newer or hostile peer sent other fields than ours
        return ProtocolError(words)
    return error if _is_readable(error) else ProtocolError(words)


def _foreign(module: str, name: str, message: str, fields: list[object]) -> Exception:
    unknown = StepError(f"{module}.{name}", message)
    scope = sys.modules.get(module)
    # Not getattr: a module that loads its names when asked would be made to.
    cls = scope.__dict__.get(name) if isinstance(scope, ModuleType) else None
    if not isinstance(cls, type) or not issubclass(cls, Exception):
        return unknown
    if issubclass(cls, StopIteration | StopAsyncIteration):
        return unknown  # no future and no coroutine can carry one
    try:
        error: object = cls(*fields)
    except Exception:  # its constructor wants something else: StepError says it all
        return unknown
    if not isinstance(error, Exception) or not _is_readable(error):
        return unknown
    return error


def _is_readable(error: Exception) -> bool:
    """Whether it has a text: fields of the wrong types may show only then."""
    try:
        return isinstance(str(error), str) and isinstance(repr(error), str)
    except Exception:  # of a class that was given what another one had
        return False


def _short(fields: list[object]) -> str:
    return ", ".join(map(reprlib.repr, fields[:_MAX_FIELDS])) or "none"


def _words(error: BaseException) -> str:
    try:
        return _shortened(str(error))
    except Exception as why:  # of a step's own class: its name and traceback must do
        return f"(its text cannot be had: {type(why).__name__})"


def _notes(error: BaseException) -> str:
    try:
        return "".join(map(str, getattr(error, "__notes__", ())))
    except Exception:  # anybody may set them, to anything: the traceback must do
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
    except Exception:  # of a user's own class
        return f"<{type(field).__name__}>"
