"""What a task is asked while the time line of a run is taken: its clock, and what its
steps were at, by that clock."""

from typing import ClassVar

from ._schema import Arrays, message


@message
class AskClock:
    """What does your clock say? Answered by `ClockTold` at once."""

    kind: ClassVar = 106
    session: int


@message
class ClockTold:
    """Seconds, by the clock that only goes forward of the process that answers."""

    kind: ClassVar = 107
    now: float


@message
class BeginCapture:
    """From now on keep the spans of the session's steps, the last ``spans`` of them,
    for at most so many ``seconds``. ``profile``: a worker has jax profile its process
    as well, into a folder of its own. Answered by `Done`."""

    kind: ClassVar = 108
    session: int
    spans: int
    seconds: float
    profile: bool


@message
class EndCapture:
    """Keep them no more, and tell those that there are. Answered by `Captured`."""

    kind: ClassVar = 109
    session: int


@message
class Captured:
    """The spans: steps (int64 [n]), places in ``phases`` (uint8 [n]), begins and ends
    (float64 [2, n], seconds by the clock of `ClockTold`). ``is_cut``: there were more.
    ``profile``: the folder that jax's profile is in; ``problem``: why there is none."""

    kind: ClassVar = 110
    phases: list[str]
    is_cut: bool
    profile: str
    problem: str
    arrays: Arrays
