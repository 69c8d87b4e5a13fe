"""Broken copies of tables of any id; see `_mutations`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zstrat.wire import Push, UpdateOp

from ._replacing import around, function, nothing

if TYPE_CHECKING:
    from collections.abc import Callable


def _counted_twice(count: Callable[..., Any], self: Any, ids: Any) -> Any:
    """A push counts twice for the ids that it is the first of."""
    counted = count(self, ids)
    self.add(self.index.rows(counted.began), 1)
    return counted


def _unremoved(original: Callable[..., Any], store: Any, change: Any) -> Any:
    """A backup drops no rows."""
    if isinstance(change, Push):
        ops = [update.op for update in change.updates]
        if ops == [UpdateOp.REMOVE_ROWS]:
            change = replace(change, arrays=(change.arrays[0][:0],))
    return original(store, change)


def _without_waiting(leaves: Callable[..., Any], self: Any) -> Any:
    """Copies and checkpoints have no ids that wait."""
    found = leaves(self)
    return {name: found[name] for name in found if name not in (".waiting", ".counts")}


_TABLES: Final = "zstrat.ps.tables"
_WAITING: Final = f"{_TABLES}._waiting.WaitingIds"
_LEAVES: Final = f"{_TABLES}._id_table.IdTable.leaves"
_REPLAY: Final = "zstrat.ps.replication"

TABLE_MUTATIONS: Final[dict[str, dict[str, Any]]] = {
    "a gradient of a new id counts twice": {
        f"{_WAITING}.count": around(f"{_WAITING}.count", _counted_twice)
    },
    "an id that was removed keeps its count": {f"{_WAITING}.drop": nothing},
    "rows that are moved are not in the index": {
        f"{_TABLES}._index.IdIndex.move": nothing
    },
    "rows begin with anything": {f"{_TABLES}._id_table.IdTable.first_rows": nothing},
    "ids that wait are not saved": {_LEAVES: around(_LEAVES, _without_waiting)},
    "a backup drops no rows": {
        f"{_REPLAY}._backup.replay": partial(
            _unremoved, function(f"{_REPLAY}._replay.replay")
        )
    },
    "a copy has no index": {f"{_TABLES}._id_table.IdTable.forget_index": nothing},
}
"""By name: what is replaced, and by what."""
