"""`LeaseBook`: which ranges of a dataset are leased, done, or to be leased again.
Decides only, without lock, clock or socket.

The examples of an epoch are positions 0 to n in an order that workers compute. The book
leases them range by range, when a step is handed out, so faster workers get more:

           ┌─────────────── returned: its step was cancelled ──────────┐
           ▼                                                            │
    not drawn ──lease──▶ open ──its step has ended well──▶ done         │
           ▲               ├────────────────────────────────────────────┘
           └── failed ─────┴──on_error="skip", or its updates ─▶ skipped
                              may have been applied

A step that runs again keeps its lease. The law of this file: each position of each
epoch is done once, skipped once, or in exactly one of ``open``, ``returned`` and
``failed``, or not drawn.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal, final

from zstrat.data import Lease
from zstrat.errors import InvalidArgumentError
from zstrat.wire import LEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

OnError = Literal["raise", "skip"]


@final
class LeaseBook:
    """The leases of one pass through a dataset, of ``epochs`` epochs.

    Args:
        name: Name of the dataset, in errors.
        batch: The most examples of a lease.
        seed: Seed of the orders of examples; a saved pass continues only with the same.
        epochs: Number of epochs; None: without end.
        drop_remainder: Leave out the examples of an epoch that do not fill a batch.
    """

    def __init__(
        self,
        name: str,
        batch: int,
        seed: int | None = None,
        epochs: int | None = 1,
        *,
        drop_remainder: bool = False,
        on_error: OnError = "raise",
    ) -> None:
        self.name: Final = name
        self.on_error: Final = on_error
        self._batch, self._seed, self.epochs = batch, seed, epochs
        self._drops: Final = drop_remainder
        self._size = 0
        """Number of examples; 0 while no worker has built the dataset."""
        self._epoch = self._next = self._end = 0
        """The epoch and the position at which the next new lease begins, and the
        position at which the leases of an epoch end."""
        self._open: dict[int, bytes] = {}
        """By step: its leases, packed as workers get them."""
        # The dict's own method, as it is called once for each step.
        self.applied: Final[Callable[[int], object]] = self._open.pop
        """Notes that the updates of a step are applied, so that its leases are done."""
        self._returned: deque[Lease] = deque()
        self._failed: deque[Lease] = deque()
        self.skipped = 0
        """Number of examples that were left out so far."""
        self.leased = 0
        """Number of leases given so far. Ranges that came back and are leased again
        count again."""
        self.noted_as = 0
        """The number under which parameter servers note which ranges are done, for a
        program that resumes the session; 0: they do not."""
        self.inherited: Sequence[Lease] = ()
        """The ranges that an earlier program has done in this pass. They are known
        before the number of examples is."""
        self.failure: Callable[[], Exception | None] = lambda: None
        """Returns the error because of which no worker can build the dataset; None: one
        still may."""

    @property
    def size(self) -> int:
        """The number of examples of an epoch; 0: not known yet."""
        return self._size

    @property
    def done(self) -> int:
        """The number of examples whose updates are applied."""
        # Computed, as a step has to cost little.
        drawn = self._epoch * self._end + self._next
        return drawn - sum(lease.size for lease in self._pending()) - self.skipped

    @property
    def total(self) -> int | None:
        """The number of examples to read in all epochs; None: without end."""
        return None if self.epochs is None else self.epochs * self._end

    @property
    def done_leases(self) -> Sequence[Lease]:
        """The ranges that are done or skipped."""
        return done_in(self.state()) if self._size else self.inherited

    @property
    def open(self) -> int:
        """The number of leases that steps have now."""
        return sum(map(len, self._open.values())) // LEASE.size

    @property
    def epoch(self) -> int:
        """The first epoch that is not over."""
        return min((lease[0] for lease in self._pending()), default=self._new)

    @property
    def is_over(self) -> bool:
        """Whether all examples of all epochs are done or skipped."""
        return self._new == self.epochs and not (
            self._open or self._returned or self._failed
        )

    @property
    def waits(self) -> bool:
        """Whether nothing can be leased until open leases have ended, or until the
        number of examples is known."""
        if not self._size:
            return self.failure() is None
        has_more = self._returned or self._failed or self._new != self.epochs
        return bool(self._open) and not has_more

    def built(self, size: int) -> str:
        """Sets the number of examples that a worker has found; returns why it cannot be
        right, or ""."""
        if not self._size:
            if self._drops and size < self._batch:
                # An epoch without a batch would never be over.
                return self._too_few(size)
            self._size = size
            self._set_end()
            if self.inherited:
                return self._inherit()
        if size == self._size:
            return ""
        return (
            f"it has {size} examples here, and {self._size} on another worker or in "
            "the checkpoint: all workers need the same source"
        )

    def left_of(self, epoch: int) -> int:
        """Returns how many leases of an epoch are still to be given to steps."""
        again = sum(each.epoch == epoch for each in (*self._returned, *self._failed))
        start = self._next if epoch == self._epoch else 0
        is_new = epoch >= self._epoch and (self.epochs is None or epoch < self.epochs)
        return again + (-(-(self._end - start) // self._batch) if is_new else 0)

    def lease_whole(self, steps: Sequence[int], number: int) -> list[bytes]:
        """Leases a whole new batch to each of the first of these steps, while whole
        batches come next. Returns the leases, packed with the ``number`` of the
        dataset; the other steps need `lease`. Most leases are given in this way, which
        costs a step little."""
        if self._returned or self._failed:
            return []
        start, batch, epoch, pack = self._next, self._batch, self._epoch, LEASE.pack
        count = min(len(steps), (self._end - start) // batch)
        self._next = stop = start + count * batch
        self.leased += count
        leases = [pack(number, epoch, at, batch) for at in range(start, stop, batch)]
        self._open.update(zip(steps, leases, strict=False))
        return leases

    def lease(self, step: int, count: int) -> Sequence[Lease]:
        """Leases the next ``count`` ranges to a step; returns [] if there are fewer."""
        drawn: list[Lease] = []
        for _ in range(count):
            if (lease := self._draw()) is None:
                # Back in front, in their order: the next step gets the same.
                self._returned.extendleft(reversed(drawn))
                return ()
            drawn.append(lease)
        self._open[step] = b"".join([LEASE.pack(0, *lease) for lease in drawn])
        self.leased += count
        return drawn

    def skip(self, step: int) -> None:
        """Leaves out the examples of a step that has failed."""
        self.skipped += sum(lease.size for lease in _unpacked(self._open.pop(step)))

    def give_back(self, step: int, *, failed: bool = False) -> None:
        """Takes back the leases of a step, which had no effect, to lease their ranges
        again. Ranges of a ``failed`` step come after all others of their epoch."""
        leases = _unpacked(self._open.pop(step))
        if failed:
            # Last, so that a batch that fails each time does not keep others from being
            # read.
            self._failed.extend(leases)
        else:
            self._returned.extendleft(reversed(leases))

    def held_by(self, step: int) -> Sequence[Lease]:
        """Returns the open leases of a step."""
        return _unpacked(self._open.get(step, b""))

    def state(self, waiting: Iterable[Lease] = ()) -> dict[str, Any]:
        """Returns the ranges that are not done, as JSON types. ``waiting`` are leases
        of ended steps whose updates are not in the values that are saved."""
        leases = sorted((*self._pending(), *waiting))
        return {
            "examples": self._size,
            "seed": self._seed,
            "epoch": self._epoch,
            "next": self._next,
            "skipped": self.skipped,
            "open": [list(lease) for lease in leases],
        }

    def misfit(self, state: Mapping[str, Any]) -> str:
        """Returns why ``state`` cannot be a state of this dataset; "" if it can."""
        saved = _Saved(state)
        if saved.size and self._size and saved.size != self._size:
            return f"it was saved with {saved.size} examples, and has {self._size} now"
        if saved.seed != self._seed:
            return f"it was saved with shuffle_seed={saved.seed}, now {self._seed}"
        if self.epochs is not None and saved.epoch >= self.epochs:
            return f"it was saved in epoch {saved.epoch}, now epochs={self.epochs}"
        if self._drops and 0 < saved.size < self._batch:
            return self._too_few(saved.size)
        return ""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues a saved pass from its state. No step may have a lease."""
        assert not self._open, "a pass is moved while steps have leases"
        saved = _Saved(state)
        # Workers have built it, maybe; if not, the size of the checkpoint is checked
        # against theirs when they have (`built`).
        self._size = self._size or saved.size
        self._epoch, self._next = saved.epoch, saved.next
        self.skipped = saved.skipped
        self._returned, self._failed = deque(saved.open), deque()
        self._set_end()

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Leases again what was done or skipped after a state of this pass, as the
        updates are lost. Steps keep the leases that they have."""
        saved, pending = _Saved(state), set(self._pending())
        self.skipped = saved.skipped
        now = self._epoch, self._next
        lost = [lease for lease in saved.open if lease not in pending]
        self._epoch, self._next = saved.epoch, saved.next
        while (self._epoch, self._next) < now and (lease := self._draw_new()):
            if lease not in pending:
                lost.append(lease)
        # Steps keep the leases that they have, so what was drawn stays drawn.
        self._epoch, self._next = max(now, (self._epoch, self._next))
        self._returned.extend(lost)

    def metrics(self) -> dict[str, Any]:
        """Returns numbers of examples, leases and epochs, as plain data."""
        return {
            "epoch": self.epoch,
            "epochs": self.epochs,
            "examples": self._size,
            "total": self.total,
            "open": self.open,
            "to_lease_again": len(self._returned) + len(self._failed),
            "done": self.done,
            "skipped": self.skipped,
        }

    def _inherit(self) -> str:
        """Continues the pass after the ranges that an earlier program has done. Returns
        why they are of other data, or ""."""
        epoch, start, size = max(self.inherited)
        if start + size > self._size:
            return (
                f"it has {self._size} examples, and a program before has done "
                f"{Lease(epoch, start, size)}: with resume= create the same datasets "
                "in the same order"
            )
        # Of epochs before a checkpoint a remainder that is left out counts as done.
        self._epoch, self._next = epoch, min(start + size, self._end)
        for gap in gaps(self.inherited, epoch, self._next, self._end):
            # A gap may be what several steps had: it is leased in batches again.
            stop = gap.start + gap.size
            for at in range(gap.start, stop, self._batch):
                self._returned.append(Lease(gap.epoch, at, min(self._batch, stop - at)))
        return ""

    @property
    def _new(self) -> int:
        """The first epoch of which some positions were never leased."""
        return self._epoch + (self._size > 0 and self._next >= self._end)

    def _too_few(self, size: int) -> str:
        return f"it has {size} examples, fewer than batch={self._batch}"

    def _set_end(self) -> None:
        self._end = self._size - (self._size % self._batch if self._drops else 0)

    def _pending(self) -> list[Lease]:
        held = b"".join(self._open.values())
        return [*_unpacked(held), *self._returned, *self._failed]

    def _draw(self) -> Lease | None:
        """Returns the next lease: a range that came back, else a new one; ranges of
        failed steps come last in their epoch. None if nothing can be leased now."""
        if self._returned:
            return self._returned.popleft()
        if self._failed and self._new > self._failed[0].epoch:
            return self._failed.popleft()
        return self._draw_new()

    def _draw_new(self) -> Lease | None:
        if self._next >= self._end:
            if self._new == self.epochs or not self._size:
                return None
            self._epoch, self._next = self._new, 0
        size = min(self._batch, self._end - self._next)
        lease = Lease(self._epoch, self._next, size)
        self._next += size
        return lease


def _unpacked(leases: bytes) -> list[Lease]:
    return [Lease(*lease) for _, *lease in LEASE.iter_unpack(leases)]


def gaps(leases: Iterable[Lease], epoch: int, stop: int, end: int) -> Iterator[Lease]:
    """Yields the ranges that none of these leases covers, before the position ``stop``
    of an ``epoch``. Each earlier epoch has ``end`` positions."""
    found: dict[int, list[Lease]] = {}
    for lease in leases:
        found.setdefault(lease.epoch, []).append(lease)
    for each in range(epoch + 1):
        at, last = 0, end if each < epoch else stop
        for lease in (*sorted(found.get(each, ())), Lease(each, last, 0)):
            if lease.start > at:
                yield Lease(each, at, lease.start - at)
            at = max(at, lease.start + lease.size)


def done_in(state: Mapping[str, Any]) -> list[Lease]:
    """Returns the ranges that are done or skipped according to a state of a
    `LeaseBook`."""
    saved = _Saved(state)
    return [*gaps(saved.open, saved.epoch, saved.next, saved.size)]


class _Saved:
    """A state of `LeaseBook.state`, checked.

    Raises:
        InvalidArgumentError: ``state`` is not such a state.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        try:
            self.size, self.seed = int(state["examples"]), state["seed"]
            self.epoch, self.next = int(state["epoch"]), int(state["next"])
            self.skipped = int(state["skipped"])
            self.open = [Lease(*map(int, lease)) for lease in state["open"]]
        except (KeyError, TypeError, ValueError):
            raise InvalidArgumentError(
                "expected the saved state of the iterator of a leased dataset, got "
                f"{state!r:.200}"
            ) from None
