"""Loads values and slots from files, or from a message.

A `Move` writes rows of a source to a value or a slot; slots that do not exist yet are
made first. All moves of a request are checked before the first one changes anything:
that sources fit, and optimizers exist. Only the disk can fail later, and then values
that were loaded in place are partly old and partly new, which the error says; load them
again.

`Loading` owns its variables and optimizers from `prepare` to `commit`, as a plan does:
no other request may use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zstrat.errors import InvalidArgumentError, NotFoundError, UnavailableError
from zstrat.ps.engine._arithmetic import is_floating
from zstrat.ps.engine._slots import SlotArray, Unbound
from zstrat.wire import LoadEntry, LoadTensors, StoreEntry, StoreTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.ps.engine._engine import Registered
    from zstrat.ps.engine._slots import HeldVariable, Slots
    from zstrat.ps.store._cell import Cell
    from zstrat.ps.store._changes import ChangeLog
    from zstrat.ps.store._store import Store


class Source(NamedTuple):
    """Rows that are read from a file or a message. ``what`` names them in errors;
    ``read_into`` fills a C-order array of this shape and dtype."""

    what: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read_into: Callable[[np.ndarray], None]

    @classmethod
    def of(cls, what: str, array: np.ndarray) -> Source:
        """Returns a source that reads from an array."""
        return cls(what, array.dtype, array.shape, lambda out: np.copyto(out, array))


class Move(NamedTuple):
    """Writes the rows of ``source`` to the rows from ``at`` on of a variable's value
    or, if ``optimizer`` is given, of its slot ``leaf``. A slot without the variable's
    rows is written whole. ``rows``: whether the array has rows, according to the
    sender."""

    held: HeldVariable
    optimizer: Registered | None
    leaf: str
    at: int
    source: Source
    rows: bool = False

    @property
    def who(self) -> str:
        name = f"variable {self.held.entry.name!r}"
        if self.optimizer is None:
            return name
        return f"{name}, slot {self.leaf!r} of optimizer {self.optimizer.name!r}"


@dataclass(slots=True)
class _Target:
    """One array to load into, and the moves that write to it."""

    cell: Cell
    moves: list[Move]
    rows: bool
    unbound: Unbound | None = None

    def fill(self) -> None:
        """Reads the sources of all moves into the array.

        If that fails, an array that was filled in place is partly new. If the new value
        was filled in other memory, that is dropped, and the value stays.
        """
        cell = self.cell
        # Whether `out` will be other memory than the value's.
        beside = cell.is_shared or cell.is_pinned
        if self._is_whole():
            out = cell.overwrite()
        else:
            old, out = cell.begin()
            if out is not old:  # the moves leave some rows as they were
                np.copyto(out, old)
        try:
            for move in self.moves:
                move.source.read_into(self.place(out, move))
        except BaseException:  # to the caller
            # A partly new value must not pass for the old one: it gets a version
            # (`commit`).
            if not beside:
                cell.settle()  # some of it is new already
            raise
        cell.settle()
        if self.unbound is not None:
            for move in self.moves:
                size = move.source.shape[0] if self.rows else 1
                self.unbound.fill(move.leaf, move.at, move.at + size)

    def place(self, out: np.ndarray, move: Move) -> np.ndarray:
        """Returns the rows of the array ``out`` that a move fills."""
        if not self.rows:
            return out
        return out[move.at : move.at + move.source.shape[0]]

    def _is_whole(self) -> bool:
        if not self.rows:
            return True
        end = 0
        for move in sorted(self.moves, key=lambda move: move.at):
            if move.at > end:
                return False
            end = max(end, move.at + move.source.shape[0])
        return end == self.cell.shape[0]


@dataclass(slots=True)
class Loading:
    """Loads values of variables and slots for one request, in four phases: ``prepare``
    runs on the optimizers' thread, ``compute`` on any thread, and ``commit`` and then
    ``log`` on the event loop, even after a failure.

    ``forgotten``: pairs of variable and optimizer whose slots are dropped, unless the
    request is refused. Loaded values of slots are written to new slots.
    """

    moves: Sequence[Move]
    forgotten: Sequence[tuple[HeldVariable, int]] = ()
    _targets: list[_Target] | None = None

    @property
    def optimizes(self) -> bool:
        return any(move.optimizer is not None for move in self.moves)

    def prepare(self) -> None:
        """Makes missing slots, and checks all moves.

        Raises:
            NotFoundError: An optimizer's state has no such leaf.
            InvalidArgumentError: A source has another shape or dtype than the array
                that it is for.
        """
        # By array: the moves into one array are made together.
        groups: dict[tuple[int, int, str], list[Move]] = {}
        for move in self.moves:
            optimizer = 0 if move.optimizer is None else move.optimizer.optimizer
            key = (move.held.entry.key, optimizer, move.leaf)
            groups.setdefault(key, []).append(move)
        # New slots are kept apart until all is checked: a refused request changes
        # nothing.
        made: dict[tuple[int, int], Slots] = {}
        checked = [self._check(moves, made) for moves in groups.values()]
        self._targets = [self._target(moves, rows, made) for moves, rows in checked]
        # Before the loaded ones are set, which may be of the same optimizer.
        for held, optimizer in self.forgotten:
            held.slots.pop(optimizer, None)
        for move in self.moves:
            if move.optimizer is not None:
                optimizer = move.optimizer.optimizer
                move.held.slots[optimizer] = self._slots_of(move, made)

    def compute(self) -> None:
        """Reads all sources into their arrays, whether `prepare` was called or not.

        Raises: Any error of the sources; some values may have changed.
        """
        if self._targets is None:
            self.prepare()
        for target in self._targets or ():
            try:
                target.fill()
            except MemoryError:
                raise UnavailableError(
                    f"{target.moves[0].who}: not enough memory to load it"
                ) from None

    def commit(self, *, whole: bool = True) -> None:
        """Gives the variables new versions, so that readers see that values changed,
        which some have even if not ``whole``."""
        for target in self._targets or ():
            # Slots have no versions.
            if target.moves[0].optimizer is None:
                target.moves[0].held.version += 1

    def log(self, log: ChangeLog, *, whole: bool) -> None:
        """Logs the loaded values and slots for the backup, as values: the files may be
        visible to this server alone. If not ``whole``, the load has failed half way,
        and the backup is marked as diverged."""
        if not whole:
            log.mark_diverged("a load failed half way")
            return
        if self.forgotten:
            dropped = [
                LoadEntry(held.entry.key, optimizer, "", "", "", 0, 0, 0)
                for held, optimizer in self.forgotten
            ]
            log.append(LoadTensors(0, dropped))
        for target in self._targets or ():
            # A lease, as the log sends it while updates continue.
            value = target.cell.lease()
            entries = [
                StoreEntry(
                    move.held.entry.key,
                    0 if move.optimizer is None else move.optimizer.optimizer,
                    move.leaf,
                    move.at,
                    target.rows,
                )
                for move in target.moves
            ]
            arrays = tuple([target.place(value, move) for move in target.moves])
            log.append(StoreTensors(0, entries, arrays))

    def _check(
        self, moves: list[Move], made: dict[tuple[int, int], Slots]
    ) -> tuple[list[Move], bool]:
        first = moves[0]
        cell, rows = first.held.cell, bool(first.held.cell.shape)
        if first.optimizer is not None:
            slots = self._slots_of(first, made)
            if isinstance(slots, Unbound):
                _make_room(first, slots)
            place = _place_of(first, slots)
            cell, rows = slots.cells[place], slots.leaves[place].rows
        if rows and first.held.table is not None:
            raise InvalidArgumentError(
                f"{first.who}: the rows of a table of any id are loaded with their "
                "ids: LoadTable, StoreTable"
            )
        for move in moves:
            _require_fit(move, cell, rows)
            if move.source.dtype != first.source.dtype:
                raise InvalidArgumentError(
                    f"{move.who}: some of it is {first.source.dtype.name} and some "
                    f"{move.source.dtype.name}"
                )
        return moves, rows

    def _slots_of(self, move: Move, made: dict[tuple[int, int], Slots]) -> Slots:
        """Returns the slots that ``move`` writes to: those of the variable, or new
        ones, which are stored in ``made``. If the optimizer's tree is not traced yet,
        new slots have only the arrays that are loaded."""
        assert move.optimizer is not None
        number, held = move.optimizer.optimizer, move.held
        key = (held.entry.key, number)
        if key in made:
            return made[key]
        # Slots that are forgotten are made new, even if some of them are loaded.
        forgets = any((each.entry.key, old) == key for each, old in self.forgotten)
        slots = None if forgets else held.slots.get(number)
        if slots is None:
            slots = made[key] = move.optimizer.make_slots(held) or Unbound.like(None)
        elif isinstance(slots, Unbound):
            slots = made[key] = Unbound.like(slots)
        return slots

    def _target(
        self, moves: list[Move], rows: bool, made: dict[tuple[int, int], Slots]
    ) -> _Target:
        """Returns the array that these moves write to, which has their dtype."""
        first = moves[0]
        if first.optimizer is None:
            return _Target(first.held.cell, moves, rows)
        slots = self._slots_of(first, made)
        place = _place_of(first, slots)
        if isinstance(slots, Unbound):
            return _Target(slots.cells[place], moves, rows, slots)
        if slots.cells[place].dtype != first.source.dtype:
            first.optimizer.programs.retype(slots, {place: first.source.dtype})
        return _Target(slots.cells[place], moves, rows)


def move_to(store: Store, entry: LoadEntry | StoreEntry, source: Source) -> Move:
    """Returns the move of a source to the value or slot that an entry names.

    Raises:
        NotFoundError: The variable or the optimizer does not exist.
    """
    held = store.variables[entry.key]
    optimizer = store.engine.get(entry.optimizer) if entry.optimizer else None
    return Move(held, optimizer, entry.leaf, entry.at, source, entry.rows)


def _make_room(move: Move, slots: Unbound) -> None:
    """Makes an array for a loaded slot whose final layout is not known yet, in the
    dtype and shape in which it was saved."""
    source, cell = move.source, move.held.cell
    rows, shape = move.rows and bool(cell.shape), source.shape
    for leaf, known in zip(slots.leaves, slots.cells, strict=True):
        if leaf.name == move.leaf and known.shape == shape:
            rows = leaf.rows  # a slot written by hand does not say
    if rows:
        shape = (cell.shape[0], *shape[1:])
    slots.make_room(SlotArray(move.leaf, rows), shape, source.dtype, cell)


def _place_of(move: Move, slots: Slots) -> int:
    for place, leaf in enumerate(slots.leaves):
        if leaf.name == move.leaf:
            return place
    names = ", ".join(repr(leaf.name) for leaf in slots.leaves) or "nothing"
    raise NotFoundError(f"{move.who}: it keeps no such thing, but {names}")


def _require_fit(move: Move, cell: Cell, rows: bool) -> None:
    source, shape = move.source, cell.shape
    if rows:
        fits = source.shape[1:] == shape[1:] and bool(source.shape)
        fits = fits and 0 <= move.at <= shape[0] - source.shape[0]
    else:
        fits = source.shape == shape and move.at == 0
    # Slots take the dtype of the gradients that they have seen; values keep theirs.
    slot = move.optimizer is not None
    alike = slot and is_floating(cell.dtype) and is_floating(source.dtype)
    if not fits or (cell.dtype != source.dtype and not alike):
        where = f" at row {move.at}" if rows and move.at else ""
        raise InvalidArgumentError(
            f"{move.who}, {cell.dtype.name}{list(shape)}: {source.what}, "
            f"{source.dtype.name}{list(source.shape)}, does not fit{where}"
        )
