"""`Residents`: the arrays that windows of local steps keep on this worker.

A *window* is several local steps that one closure runs on the worker's own copy of the
variables (`zstrat.program.windows`). The state of its inner optimizer, and a copy of
variables that outlives the window, are *resident arrays*: they belong to this worker
and are never sent. A run of a window reads them and writes the next ones, which count
once the contribution of the window is acknowledged: a window that runs again here after
a failure begins with the arrays of its first run. Laws of the file: at most one run
waits for its acknowledgement; arrays are never written to.

If the variables are exchanged in fragments, round r exchanges fragment r modulo their
number, so a window has to know its round before its program is chosen. A worker counts
the rounds itself: its windows are for successive rounds. The values that a window has
read show which round was open. If that was another round (the worker has joined, or was
late), the window contributes nothing, and the worker counts from that round on. Nothing
is lost, because the difference that the worker contributes next counts from the value
that it last read.

A checkpoint has the arrays as they were at the moment of the checkpoint. They are never
written to, so holding references to them is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from zstrat.errors import NotFoundError
from zstrat.program import (
    COPY,
    ROUND,
    SPEED,
    STEPS,
    ResidentName,
    Segment,
    resident_name,
)
from zstrat.variables import RESIDENT
from zstrat.wire import RoundNumber, SnapshotPinned, TensorEntry, raw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.program import Exchanges, StepUpdate
    from zstrat.variables import VariableSpec
    from zstrat.wire import PinSnapshot, ReadSnapshot, StoreTensors

_PAGE: Final = 500
"""Most entries in one answer: their names are sent in its header."""


class WindowPlace(NamedTuple):
    """Which window of an optimizer's on this worker a closure runs: its index, round
    and segment."""

    optimizer: int
    ordinal: int
    """How many windows of the optimizer came before this one on this worker."""
    round: int
    """The round that the window is for, as far as the worker knew."""
    segment: Segment
    is_whole: bool
    """Whether all variables are one fragment, so that any round will do."""
    steps: int
    """How many local steps the window makes."""
    adapts: bool = False
    """Whether workers make different numbers of steps per window."""

    def weight(self, examples: int) -> float:
        """Returns the weight of the window in a round, if the user gives none: 1, or,
        where workers make different numbers of steps, the examples of the window times
        the examples of one step (Douillard et al., 2026)."""
        return float((examples or self.steps) ** 2 / self.steps if self.adapts else 1)


@final
@dataclass(slots=True)
class _Progress:
    """How far a worker has come in the windows and rounds of one optimizer."""

    taken: int = 0
    """Number of windows that were given an index."""
    offset: int = 0
    """The round of a window, minus its index."""
    restarts: bool = True
    """Whether the next window reads the values of all fragments from the servers."""
    every: int = 0
    """The number of steps per window to which this worker has adapted; 0: no
    adaptation."""
    speed: float = 0.0
    """Steps per second of the last windows; 0: not known."""


@final
class Residents:
    """The resident arrays of one session's windows of local steps, and which window is
    next. Only the executor thread uses this object, except `read` and `release`."""

    def __init__(self) -> None:
        self._arrays: dict[ResidentName, np.ndarray] = {}
        self._before: dict[ResidentName, np.ndarray | None] = {}
        """By name: the arrays from before the run whose contribution is not
        acknowledged."""
        self._step: int | None = None
        """The step of the run whose contribution is not acknowledged."""
        self._place: WindowPlace | None = None
        """The place of the window whose contribution is not acknowledged."""
        self._pins: dict[int, list[tuple[ResidentName, np.ndarray]]] = {}
        self._progress: dict[int, _Progress] = {}
        self._expected: RoundNumber | None = None
        """The round whose values a window has assumed when it began before its values
        arrived."""
        self.version = 0
        """Changes whenever the arrays change, or a window reads another round than the
        one it began with."""

    def inherit(self, other: Residents) -> None:
        """Takes over the arrays of the coordinator's previous session, whose connection
        broke."""
        self._arrays, self._progress = other._arrays, other._progress
        self.version += 1
        self._before, self._step = other._before, other._step
        self._place, self._pins = other._place, other._pins

    # Checkpoints

    def pin(self, message: PinSnapshot) -> SnapshotPinned:
        """Keeps the arrays of some optimizers as they are now, until `release`, and
        describes them.

        Raises:
            NotFoundError: The message continues a snapshot that is not here.
        """
        if not message.first:
            self._pins[message.snapshot] = [
                each
                for each in self._arrays.items()
                if each[0].variable and each[0].optimizer in message.optimizers
            ]
        pinned = self._pinned(message.snapshot)
        entries = [
            TensorEntry(
                name.variable,
                name.optimizer,
                name.what,
                array.dtype.name,
                list(array.shape),
                False,
            )
            for name, array in pinned[message.first : message.first + _PAGE]
        ]
        return SnapshotPinned(entries, len(pinned))

    def read(self, message: ReadSnapshot) -> np.ndarray:
        """Returns some bytes of an array that is pinned for a snapshot. From any
        thread.

        Raises:
            NotFoundError: The snapshot is not here.
        """
        array = self._pinned(message.snapshot)[message.tensor][1]
        data = np.frombuffer(raw(array), np.uint8)
        return data[message.offset : message.offset + message.size]

    def release(self, snapshot: int) -> None:
        """Releases the arrays of a snapshot; ignores an unknown one. From any
        thread."""
        # One operation of a dict, as the loop calls this beside the thread.
        self._pins.pop(snapshot, None)

    def _pinned(self, snapshot: int) -> list[tuple[ResidentName, np.ndarray]]:
        pinned = self._pins.get(snapshot)
        if pinned is None:
            raise NotFoundError(f"there is no snapshot {snapshot}")
        return pinned

    def restart(self, optimizer: int, number: int) -> None:
        """Drops all arrays of an optimizer, and counts its windows from round
        ``number``, which is open, on."""
        # What is not settled belongs to values that the restore has replaced.
        self._before, self._step, self._place = {}, None, None
        self._progress[optimizer] = _Progress(offset=number)
        for name in [name for name in self._arrays if name.optimizer == optimizer]:
            del self._arrays[name]
        self.version += 1

    def store(self, message: StoreTensors) -> None:
        """Stores arrays of a checkpoint. Call `restart` before."""
        for entry, array in zip(message.entries, message.arrays, strict=True):
            name = ResidentName(entry.leaf, entry.key, entry.optimizer)
            self._arrays[name] = np.array(array)  # not the memory of the message
            # With its copies the next window continues, as the one after a window does.
            if name.what == COPY:
                self._progress[entry.optimizer].restarts = False
        self.version += 1

    # Windows

    def filled(
        self,
        reads: Sequence[VariableSpec],
        pulled: Sequence[Any],
        step: int,
        at: RoundNumber,
    ) -> list[Any]:
        """Returns the values of all reads of a step, then the pulled rows. Values are
        taken from ``pulled`` or, if resident, from this worker, for the round ``at``. A
        resident array that does not exist yet is zeros."""
        self._begin_again(step)
        if self._expected not in (None, at):
            self._expected = None
            self.version += 1
        left = iter(pulled)
        values = [
            self._value(spec, at) if spec.ps == RESIDENT else next(left)
            for spec in reads
        ]
        return [*values, *left]

    def early(
        self, reads: Sequence[VariableSpec], step: int, place: WindowPlace
    ) -> list[Any]:
        """Returns what `filled` returns for the round that is expected, with None for
        each value that is still to be pulled."""
        at = RoundNumber(place.optimizer, place.round)
        pulled = [None for spec in reads if spec.ps != RESIDENT]
        values = self.filled(reads, pulled, step, at)
        self._expected = at
        return values

    def put(
        self, step: int, updates: Sequence[StepUpdate], place: WindowPlace | None = None
    ) -> None:
        """Keeps the resident arrays that a step has written, in place of the previous
        ones."""
        arrays: dict[ResidentName, np.ndarray] = {}
        for update in updates:
            name = resident_name(update.spec.name)
            if place is not None and name.what == STEPS:
                # The number of steps is part of the next window's program, so it is
                # needed before that is chosen.
                self._progress[place.optimizer].every = int(update.arrays[0])
            arrays[name] = update.arrays[0]
        # The old arrays stay until the contribution is acknowledged, which doubles the
        # memory of these arrays for a while.
        self._before = {name: self._arrays.get(name) for name in arrays}
        self._step, self._place = step, place
        self.version += 1
        self._arrays.update(arrays)

    def settle(self, step: int | None, *, failed: bool) -> None:
        """Records that the contribution of a step was acknowledged, or that it failed.
        After a failure the previous arrays are restored."""
        if step is None or step != self._step:
            return
        if failed:
            self.version += 1
            for name, array in self._before.items():
                if array is None:
                    self._arrays.pop(name, None)
                else:
                    self._arrays[name] = array
            if self._place is not None:
                self.lose_copies(self._place)
        self._before, self._step, self._place = {}, None, None

    def lose_copies(self, place: WindowPlace) -> None:
        """Drops the copies that the next window with fragments would continue, because
        this window has failed. That window would merge the fragment of the round
        before, whose base is from before the worker's contribution, so the contribution
        would be counted twice."""
        if place.is_whole:
            return
        self._progress[place.optimizer].restarts = True
        self.version += 1
        for name in list(self._arrays):
            if name.optimizer == place.optimizer and name.what == COPY:
                del self._arrays[name]

    def take_place(self, exchanges: Exchanges) -> WindowPlace:
        """Returns the place of the next window of the optimizer of ``exchanges``."""
        optimizer = exchanges.outer.id
        progress = self._progress.setdefault(optimizer, _Progress())
        # Taken when a window is prepared, maybe several ahead, so the numbers are in
        # the order of dispatch.
        index, progress.taken = progress.taken, progress.taken + 1
        restarts, progress.restarts = progress.restarts, False
        number, is_whole = index + progress.offset, exchanges.fragments == 1
        # A window that keeps no copy is the same program each time.
        restarts = restarts or not exchanges.keep_copies
        every = progress.every if progress.every < exchanges.every else 0
        segment = Segment(number % exchanges.fragments, restarts, every)
        steps = exchanges.steps_in(segment)
        adapts = exchanges.pace is not None
        return WindowPlace(optimizer, index, number, segment, is_whole, steps, adapts)

    def give_back(self, place: WindowPlace) -> None:
        """Gives the place of a window that will not run to the next window. Of several
        windows, call this for the last one first."""
        progress = self._progress[place.optimizer]
        progress.taken -= 1
        # The order to take all fragments goes back with the place.
        progress.restarts = progress.restarts or place.segment.restart

    def may_run(
        self, step: int, place: WindowPlace, reads: Sequence[VariableSpec]
    ) -> bool:
        """Returns whether the worker has the copies that a window continues. They are
        missing if the previous window has failed, or was of other variables; then the
        next window reads all values from the servers."""
        self._begin_again(step)
        names = [resident_name(x.name) for x in reads if x.ps == RESIDENT]
        if all(name in self._arrays for name in names if name.what == COPY):
            return True
        # The next window takes all values; this one is sent back.
        self._progress[place.optimizer].restarts = True
        return False

    def has_run(self, place: WindowPlace, round_read: int) -> bool:
        """Records the round whose values a window has read; returns whether that is the
        round that the window is for."""
        progress = self._progress[place.optimizer]
        # The worker counts on from what was read, not from what it had expected.
        before, progress.offset = progress.offset, round_read - place.ordinal
        if place.is_whole or round_read == place.round:
            return True
        # A window that runs again reads before the end of the round.
        is_early = round_read == place.round - 1
        # A round in between was missed, so the copies lack what that round made of its
        # fragment.
        if before != progress.offset and not (is_early or place.segment.restart):
            progress.restarts = True
        return False

    def took(self, place: WindowPlace, seconds: float) -> None:
        """Records how long the steps of a window took, without waiting for values."""
        progress = self._progress[place.optimizer]
        speed = place.steps / max(seconds, 1e-9)
        # The mean of the last and all before, halved each time: it follows a machine
        # whose speed changes.
        progress.speed = (progress.speed + speed) / 2 if progress.speed else speed

    def _begin_again(self, step: int) -> None:
        """Restores the arrays from before an earlier run of the same step, if that run
        was not acknowledged."""
        if step == self._step:
            self.settle(step, failed=True)

    def _value(self, spec: VariableSpec, at: RoundNumber) -> Any:
        name = resident_name(spec.name)
        if name.what == ROUND:
            return np.int32(at.number)
        if name.what == SPEED:
            return np.float32(self._progress[at.optimizer].speed)
        array = self._arrays.get(name)
        if array is not None and array.shape == spec.shape:
            return array
        return np.zeros(spec.shape, spec.numpy_dtype)
