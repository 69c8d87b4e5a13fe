"""What a coordinator and a worker say to each other about closures and their resources.

Code and arguments are shipped once and named from then on; what is dispatched is
answered by `Completions`, many in one message.
"""

import enum
from typing import ClassVar, NamedTuple

from ._schema import Arrays, PlainTree, message


class Outcome(enum.IntEnum):
    """How a closure ended on a worker."""

    OK = 0
    FAILED = 1
    CANCELLED = 2


@message
class PutCode:
    """Ships a pickled object (a step function, a dataset function) once, named by its
    digest. Taken from a coordinator alone. Answered by `Done`."""

    kind: ClassVar = 48
    session: int
    digest: bytes
    code: bytes


@message
class PutArguments:
    """Ships the pickled ``(args, kwargs)`` of closures; large arrays travel beside it
    (pickle protocol 5, out of band, in order). A notice: order on the link suffices."""

    kind: ClassVar = 49
    session: int
    arguments: int
    code: bytes
    arrays: Arrays


@message
class DropArguments:
    """No closure with these arguments is left. A notice: order on the link suffices."""

    kind: ClassVar = 50
    session: int
    arguments: list[int]


class Batch(NamedTuple):
    """Closures that share function and arguments; ``arguments`` 0: called without any.
    ``attempt`` is 1 for the first try. ``size`` is how many bytes of ``inputs`` each of
    them has."""

    function: bytes
    arguments: int
    attempt: int
    steps: list[int]
    size: int


@message
class Dispatch:
    """Runs the closures in order. A notice, answered by `Completions` as they end.
    ``inputs`` are the arrays among their arguments, closure after closure; those of a
    batch of large ``size`` are ``arrays`` instead, uint8 [size] for each closure.
    ``waiting`` is how many are left in the program, and ``full`` whether it could not
    schedule more."""

    kind: ClassVar = 51
    session: int
    low_water: int
    batches: list[Batch]
    inputs: bytes
    arrays: Arrays
    waiting: int = 0
    full: bool = False


class Completion(NamedTuple):
    """``layout`` names a `LayoutMessage` sent before or with it on this link; ``size``
    is how many bytes of ``results`` are this closure's, -1 if they stay on the worker
    (`Fetch`). ``error`` is `errors.to_wire` or None."""

    step: int
    outcome: int
    layout: int
    size: int
    error: PlainTree


class LayoutMessage(NamedTuple):
    """How to cut a result: dtype names and shapes of the leaves, and their structure
    (nested lists and dicts with leaf numbers, or None if it is not plain)."""

    layout: int
    dtypes: list[str]
    shapes: list[list[int]]
    structure: PlainTree


@message
class Completions:
    """Closures that ended; a notice from worker to coordinator. ``results`` is the
    little-endian C-order bytes of all small results, leaf after leaf."""

    kind: ClassVar = 52
    session: int
    completions: list[Completion]
    layouts: list[LayoutMessage]
    results: bytes


class PrintedText(NamedTuple):
    """Lines that were printed to one stream (1: standard output, 2: standard error),
    each with its end; before them so many lines were ``dropped``."""

    stream: int
    text: str
    dropped: int


@message
class Printed:
    """What steps and dataset functions of the session have printed, in order; a notice
    from worker to coordinator. What a step has printed goes before its completion."""

    kind: ClassVar = 67
    session: int
    texts: list[PrintedText]


@message
class CancelSteps:
    """Drops every closure that has not begun; each one is answered in `Completions` as
    cancelled. What runs, runs to its end."""

    kind: ClassVar = 53
    session: int


@message
class Fetch:
    """Asks for a result that stayed on the worker; answered by `Fetched`."""

    kind: ClassVar = 54
    session: int
    step: int


@message
class Fetched:
    """The leaves of the result that `Fetch` asked for."""

    kind: ClassVar = 55
    arrays: Arrays


@message
class DropResults:
    """The program holds no value of these steps any more. A notice."""

    kind: ClassVar = 56
    session: int
    steps: list[int]


@message
class BuildResource:
    """Builds (again) a per-worker resource from shipped code; answered by
    `ResourceBuilt` or by the `Failure` that the code raised. ``maker`` is the digest of
    a callable, ``purpose`` is "iterator" (its result is iterated) or "value". A dataset
    is told that it is for input pipeline ``pipeline`` of ``pipelines``; 0 of them: that
    of the worker's place in the session. An iterator goes on at ``state``, of an
    `IteratorState`; "": at the beginning."""

    kind: ClassVar = 57
    session: int
    resource: int
    purpose: str
    maker: bytes
    arguments: int
    pipeline: int = 0
    pipelines: int = 0
    state: str = ""


@message
class ResourceBuilt:
    """``layout`` describes the elements of an iterator (its first one)."""

    kind: ClassVar = 58
    layout: LayoutMessage


@message
class AskIteratorState:
    """Asks for the place of an iterator in its data, all that was put back counted as
    not drawn. Answered by `IteratorState`, or by the `Failure` to say it."""

    kind: ClassVar = 115
    session: int
    resource: int


@message
class AskIteratorFit:
    """Asks whether an iterator can go to the ``state`` of an `IteratorState`. Answered
    by `Done`, or by the `Failure` that says why it cannot."""

    kind: ClassVar = 117
    session: int
    resource: int
    state: str


@message
class IteratorState:
    """``state`` is JSON; "" where the iterator had no element when it was built, or
    could not be built: then it is where it was to begin."""

    kind: ClassVar = 116
    state: str


@message
class DropResources:
    """The program holds these resources no more; the worker closes them. A notice."""

    kind: ClassVar = 59
    session: int
    resources: list[int]


StepMessage = (
    PutCode
    | PutArguments
    | DropArguments
    | Dispatch
    | Completions
    | Printed
    | CancelSteps
    | Fetch
    | Fetched
    | DropResults
    | BuildResource
    | ResourceBuilt
    | AskIteratorState
    | AskIteratorFit
    | IteratorState
    | DropResources
)
