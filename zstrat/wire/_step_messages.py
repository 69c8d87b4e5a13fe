"""Messages between a coordinator and a worker about closures and their resources.

A *closure* is one scheduled run of a step function on a worker. Code and arguments are
sent once, and then referred to by digest or number. Dispatched closures are answered by
`Completions`, many in one message.
"""

import enum
import struct
from dataclasses import field
from typing import ClassVar, Final, NamedTuple

from ._messages import Message, message
from ._schema import Arrays, PlainTree
from ._session import COORDINATOR, Repeat, request


class Outcome(enum.IntEnum):
    """The outcome of a closure on a worker. FAILED: this run has sent no updates;
    DOUBTFUL: it failed too, and some may have been applied. CANCELLED: it did not run.
    """

    OK = 0
    FAILED = 1
    CANCELLED = 2
    DOUBTFUL = 3


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class PutCode(Message):
    """Sends a pickled object (a step function, a dataset function), named by its
    digest. Answered by `Done`."""

    kind: ClassVar = 48
    session: int
    digest: bytes
    code: bytes


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class PutArguments(Message):
    """Sends the pickled ``(args, kwargs)`` of closures, with large arrays out of band
    (pickle protocol 5). A notice, as messages of a link keep their order."""

    kind: ClassVar = 49
    session: int
    arguments: int
    code: bytes
    arrays: Arrays


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class DropArguments(Message):
    """Drops arguments that no closure needs. A notice, as messages of a link keep their
    order."""

    kind: ClassVar = 50
    session: int
    arguments: list[int]


class Batch(NamedTuple):
    """Closures that share function and arguments; ``arguments`` 0: no arguments.
    ``attempt`` is 1 for the first try. ``size`` is the number of bytes of ``inputs``
    (see `Dispatch`) per closure; the last of these bytes are as many `LEASE` structures
    as ``leases`` says."""

    function: bytes
    arguments: int
    attempt: int
    steps: list[int]
    size: int
    leases: int = 0


LEASE: Final = struct.Struct("<QQQQ")
"""A range of a leased dataset, whose examples are assigned to closures in ranges: its
resource, the epoch, the first position in the order of the epoch, and the number of
examples."""


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class Dispatch(Message):
    """Sends closures, which the worker runs in order. A notice, followed by
    `Completions` as the closures end. ``inputs`` are the arrays among the arguments of
    the closures, closure after closure; a batch of large ``size`` has ``arrays``
    instead, uint8 [size] per closure. ``waiting`` is the number of closures that still
    wait in the program, ``full`` whether the program's queue is full. ``metrics``, for
    observers of the worker, are those of `ClusterCoordinator.metrics` that only the
    program knows; None: they have not changed."""

    kind: ClassVar = 51
    session: int
    low_water: int
    batches: list[Batch]
    inputs: bytes
    arrays: Arrays
    waiting: int = 0
    full: bool = False
    metrics: PlainTree = None


class Completion(NamedTuple):
    """The end of one closure. ``layout`` is the number of the `LayoutMessage` of its
    result, sent before or in the same message; ``size`` is the number of the result's
    bytes in ``results``, -1 if the result stays on the worker (`Fetch`). ``error`` is
    `errors.to_wire` or None."""

    step: int
    outcome: int
    layout: int
    size: int
    error: PlainTree


class LayoutMessage(NamedTuple):
    """Describes a result: dtype names and shapes of the leaves, and their structure
    (nested lists and dicts with leaf numbers, or None if it is not plain)."""

    layout: int
    dtypes: list[str]
    shapes: list[list[int]]
    structure: PlainTree


class StepContribution(NamedTuple):
    """The gradients that a run of a step has contributed to rounds of an optimizer,
    computed from values of variables that are at least those of the round ``base``.
    ``coupled``: the optimizer computes operands from all gradients of a round
    (`MergeOperands`)."""

    step: int
    attempt: int
    optimizer: int
    base: int
    weight: float
    coupled: bool


@message
class Completions(Message):
    """Reports ended closures; a notice from worker to coordinator. ``results`` are the
    little-endian C-order bytes of all small results, leaf after leaf."""

    kind: ClassVar = 52
    session: int
    completions: list[Completion]
    layouts: list[LayoutMessage]
    results: bytes
    contributions: list[StepContribution] = field(default_factory=list)


class PrintedText(NamedTuple):
    """Lines that were printed to one stream (1: standard output, 2: standard error),
    each with its newline, after ``dropped`` lines that were not sent."""

    stream: int
    text: str
    dropped: int


@message
class Printed(Message):
    """Sends the output of steps and dataset functions of the session, in order; a
    notice from worker to coordinator. The output of a step is sent before its
    completion."""

    kind: ClassVar = 67
    session: int
    texts: list[PrintedText]


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class CancelSteps(Message):
    """Cancels every closure that has not begun; the worker reports each as cancelled in
    `Completions`. A running closure continues. A notice."""

    kind: ClassVar = 53
    session: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class Fetch(Message):
    """Asks a worker for a result that stayed there. Answered by `Fetched`."""

    kind: ClassVar = 54
    session: int
    step: int


@message
class Fetched(Message):
    """Answers `Fetch` with the leaves of the result."""

    kind: ClassVar = 55
    arrays: Arrays


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class DropResults(Message):
    """Drops results that the program no longer refers to. A notice."""

    kind: ClassVar = 56
    session: int
    steps: list[int]


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class BuildResource(Message):
    """Builds or rebuilds a per-worker resource from sent code. Answered by
    `ResourceBuilt`, or by a `Failure` with the error of the code. ``maker`` is the
    digest of a callable, ``purpose`` is "iterator" (the worker iterates over its
    result) or "value". A dataset is built for input pipeline ``pipeline`` of
    ``pipelines``; if ``pipelines`` is 0, for the worker's index in the session. An
    iterator continues at ``state``, of an `IteratorState`; "": at the beginning.
    ``noted_as``: the number under which parameter servers note which ranges of a leased
    dataset are done; 0: they note nothing."""

    kind: ClassVar = 57
    session: int
    resource: int
    purpose: str
    maker: bytes
    arguments: int
    pipeline: int = 0
    pipelines: int = 0
    state: str = ""
    noted_as: int = 0


@message
class ResourceBuilt(Message):
    """Answers `BuildResource`. ``layout`` describes the elements of an iterator by its
    first one. ``examples`` is the number of examples of a leased dataset; 0: the
    resource is not one."""

    kind: ClassVar = 58
    layout: LayoutMessage
    examples: int = 0


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class AskIteratorState(Message):
    """Asks for the position of an iterator, in which elements that were put back count
    as not drawn. Answered by `IteratorState`, or by a `Failure`."""

    kind: ClassVar = 115
    session: int
    resource: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class AskIteratorFit(Message):
    """Asks whether an iterator can continue at the ``state`` of an `IteratorState`.
    Answered by `Done`, or by a `Failure` with the reason."""

    kind: ClassVar = 117
    session: int
    resource: int
    state: str


@message
class IteratorState(Message):
    """The position of an iterator. ``state`` is JSON; "" if the iterator was empty or
    could not be built, and so its position is still the beginning."""

    kind: ClassVar = 116
    state: str


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class DropResources(Message):
    """Closes resources that the program no longer refers to. A notice."""

    kind: ClassVar = 59
    session: int
    resources: list[int]
