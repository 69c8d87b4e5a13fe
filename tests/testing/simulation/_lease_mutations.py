"""Broken copies of leases, as in `_mutations`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zstrat.wire import LEASE

from ._replacing import around

if TYPE_CHECKING:
    from collections.abc import Callable


def _kept(self: Any, step: int, **how: bool) -> None:
    """What was leased counts as done, though its step had no effect."""
    self._open.pop(step)


def _again(lease: Callable[..., Any], self: Any, steps: Any, number: int) -> Any:
    """The last range is leased to the next step, too."""
    leases = lease(self, steps, number)
    if leases and LEASE.unpack(leases[-1])[2] % 3 == 0:
        self._next -= self._batch
    return leases


def _other(
    retry: Callable[..., Any], self: Any, closure: Any, *args: Any, **how: Any
) -> Any:
    """A step that a worker gives back unstarted gets another range."""
    if not how["begun"]:
        closure.leases = b""
    return retry(self, closure, *args, **how)


def _whole(state: Callable[..., Any], self: Any, *args: Any) -> Any:
    """What steps have is not in checkpoints."""
    return {**state(self, *args), "open": []}


_BOOK: Final = "zstrat.coordinator.leases._book.LeaseBook"
_RETRY: Final = "zstrat.coordinator._queue.Queue.retry"

LEASE_MUTATIONS: Final[dict[str, dict[str, Any]]] = {
    "leases are done before their steps are acknowledged": {
        f"{_BOOK}.give_back": _kept
    },
    "a range is leased twice": {
        f"{_BOOK}.lease_whole": around(f"{_BOOK}.lease_whole", _again)
    },
    "a worker that gives steps back loses their ranges": {
        _RETRY: around(_RETRY, _other)
    },
    "a checkpoint has no open leases": {
        f"{_BOOK}.state": around(f"{_BOOK}.state", _whole)
    },
    "a program that goes on leases what was done": {
        "zstrat.ps.store._ledger.DoneLeases.note": lambda self, packed: None
    },
}
