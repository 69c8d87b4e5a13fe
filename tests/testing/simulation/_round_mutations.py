"""Broken copies of rounds; see `_mutations`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from zstrat.wire import CloseRound, Contribute

from ._replacing import around, function, nothing

if TYPE_CHECKING:
    from collections.abc import Callable


async def _two_sets(
    close: Callable[..., Any],
    self: Any,
    closed: Any,
    kept: Any,
    over: int,
    operands: Any = (),
) -> None:
    """The first server takes a round without its last member."""
    each = self.each

    def parted(messages: Any, want: Any) -> Any:
        (ps, first), *others = messages
        order = first.order
        less = replace(first, order=order._replace(members=order.members[:-1]))
        return each([(ps, less), *others], want)

    self.each = parted
    try:
        await close(self, closed, kept, over, operands)
    finally:
        del self.each


def _twice(merging: Callable[..., Any], self: Any, message: Any) -> Any:
    """A server counts the first member twice."""
    found = merging(self, message)
    if found is not None:
        for gradients in found.gradients.values():
            gradients.append(gradients[0])
    return found


_late: Final[dict[int, set[int]]] = {}
"""By optimizer, steps that came late."""


def _contributed(
    contributed: Callable[..., Any], self: Any, worker: int, given: Any, now: float
) -> None:
    if given.base < self.number:
        _late.setdefault(self.optimizer, set()).add(given.step)
    contributed(self, worker, given, now)


def _in_two(close: Callable[..., Any], self: Any) -> Any:
    """A late contribution stays when its round is closed."""
    late = _late.pop(self.optimizer, set())
    again = {step: each for step, each in self._members.items() if step in late}
    closing = close(self)
    self._members.update(again)
    return closing


def _early(
    contribute: Callable[..., Any],
    self: Any,
    sent: Any,
    ending: Any,
    read_at: Any,
    now: float,
) -> None:
    """A contribution is reported as it is sent."""
    contribute(self, sent, ending, read_at, now)
    self._reports.soon(ending)


def _without(kind: type[Any]) -> Callable[..., Any]:
    replay = function("zstrat.ps.replication._replay.replay")

    def made(store: Any, change: Any) -> Any:
        return iter(()) if isinstance(change, kind) else replay(store, change)

    return made


def _forgetful(contribute: Callable[..., Any], self: Any, *args: Any) -> None:
    """A worker does not know that it has contributed."""
    contribute(self, *args)
    self._after.clear()


def _unordered(close: Callable[..., Any], self: Any) -> Any:
    closing = close(self)
    closing.order.members.reverse()
    return closing


def _closed_apart(count: Callable[..., Any], self: Any, *args: Any) -> None:
    """Servers drop what waits for a later round."""
    message, *more = args
    count(self, replace(message, kept=[], over=2**40), *more)


_CLIENT: Final = "zstrat.ps.client._pushing.RoundCalls.close_round"
_ROUNDS: Final = "zstrat.coordinator.rounds._optimizer_rounds.OptimizerRounds"
_SESSION: Final = "zstrat.coordinator.rounds._optimizer_rounds.SessionRounds"
_STATISTICS: Final = "zstrat.coordinator.rounds._optimizer_rounds.RoundStatistics"
_OPEN: Final = "zstrat.ps.store._rounds.OpenRounds"
_CONTRIBUTE: Final = "zstrat.worker._worker_session.WorkerSession._contribute"
_REPLAY: Final = "zstrat.ps.replication._backup.replay"

ROUND_MUTATIONS: Final[dict[str, dict[str, Any]]] = {
    "two servers close a round with two member sets": {
        _CLIENT: around(_CLIENT, _two_sets)
    },
    "a contribution counts twice": {
        f"{_OPEN}.merging": around(f"{_OPEN}.merging", _twice)
    },
    "a late contribution is in two rounds": {
        f"{_ROUNDS}.contributed": around(f"{_ROUNDS}.contributed", _contributed),
        f"{_ROUNDS}.close": around(f"{_ROUNDS}.close", _in_two),
    },
    "a round closes before its members are acknowledged": {
        _CONTRIBUTE: around(_CONTRIBUTE, _early)
    },
    "a pull does not wait for its round": {
        "zstrat.ps._step_requests.RoundRequests._has_to_wait": (
            lambda self, message: False
        )
    },
    "a backup lacks contributions": {_REPLAY: _without(Contribute)},
    "a backup closes no rounds": {_REPLAY: _without(CloseRound)},
    "rounds go on counting on servers that were emptied": {
        f"{_SESSION}.restart": nothing
    },
    "a worker forgets that it has contributed": {
        _CONTRIBUTE: around(_CONTRIBUTE, _forgetful)
    },
    "members are in no order": {
        f"{_ROUNDS}.close": around(f"{_ROUNDS}.close", _unordered)
    },
    "late contributions are not counted": {f"{_STATISTICS}.contributed_late": nothing},
    "join leaves rounds open": {f"{_SESSION}.is_open_below": lambda self, step: False},
    "servers drop what waits for a later round": {
        f"{_OPEN}.closed": around(f"{_OPEN}.closed", _closed_apart)
    },
}
"""By name: what is replaced, and by what."""
