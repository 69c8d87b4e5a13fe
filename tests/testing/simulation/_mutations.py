"""Broken copies of zstrat: each breaks one promise, to see that the contract notices.

A mutation is a context manager that replaces one method of the real thing while runs
are made. What it replaces is named by a text, as it is nobody's to import.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from zstrat.coordinator.parts import cut_of
from zstrat.errors import NotPrimaryError
from zstrat.ps import StoreRole
from zstrat.wire import (
    ChangeProgram,
    CopyVariables,
    DeleteVariables,
    Exchange,
    Push,
    Pushed,
)

from ._lease_mutations import LEASE_MUTATIONS
from ._replacing import around, function, nothing
from ._round_mutations import ROUND_MUTATIONS
from ._run import run_seed
from ._table_mutations import TABLE_MUTATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._run import SeedVerdict


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Everything in the block is broken in that way.

    Raises:
        KeyError: There is no mutation of that name.
    """
    with contextlib.ExitStack() as stack:
        for target, replacement in MUTATIONS[name].items():
            stack.enter_context(mock.patch(target, replacement))
        yield


def run_mutated(
    name: str | None, seed: int, told: Callable[[str], None] | None = None
) -> SeedVerdict:
    """`run_seed` in a block of `mutated`; None: of zstrat as it is."""
    with mutated(name) if name else contextlib.nullcontext():
        return run_seed(seed, told)


def _no(self: Any, *args: Any, **options: Any) -> bool:
    return False


def _unfenced(self: Any, end: int, doubtful: object, told: Callable[..., Any]) -> None:
    told({})


async def _up_to_nothing(self: Any, low_water: int, over: object) -> None:
    """Nobody is asked."""


def _early(handle: Callable[..., Any], self: Any, remote: Any, message: Any) -> Any:
    """A push is acknowledged, and applied a moment later."""
    if not isinstance(message, Push) or message.writer:
        return handle(self, remote, message)
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, partial(_quietly, handle, self, remote, message))
    return Pushed(True, [0] * len(message.updates))


def _quietly(handle: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(Exception):
        handle(*args)


def _all_resent(message: Any) -> Any:
    return message


def _unnamed(self: Any) -> tuple[int, int]:
    return -1, -1


def _same_session(self: Any) -> None:
    for task in self._cluster.ps:
        task.renew(self.session, [])


def _too_far(tell: Callable[..., None], self: Any, low_water: int, now: float) -> None:
    tell(self, low_water + 8, now)


def _told_early(self: Any, updates: Any, ending: Any) -> None:
    self.client.push(ending.completion.step, 0, self._low_water, updates)
    self._reports.soon(ending)


def _unlost(self: Any, closure: Any, worker: str, now: float) -> list[Any]:
    """A closure that was lost is never handed out again."""
    self._stopped(closure)
    return []


async def _restless(self: Any, holder: object) -> Any:
    return cut_of(self._dispatcher.queue)


def _serves_on(self: Any, *role: object) -> None:
    """A primary hears that a newer view has another one, and goes on alone."""
    self.backups.detach()


def _unledgered(original: Callable[..., Any], store: Any, change: Any) -> Any:
    """A backup makes a change, and does not know of which step it was."""
    if isinstance(change, Push):
        change = replace(change, step=-1, writer=0)
    return original(store, change)


def _remembering(begin: Callable[..., None], store: Any) -> None:
    """What the program before has applied is taken for what the next one sends."""
    kept = store.ledger, store.writers, store.parts
    begin(store)
    store.ledger, store.writers, store.parts = kept


def _unbegun(original: Callable[..., Any], store: Any, change: Any) -> Any:
    """A backup does not hear that another program goes on."""
    return iter(()) if isinstance(change, ChangeProgram) else original(store, change)


def _untold(self: Any, origin: int) -> None:
    """Servers that are added later do not hear what keys are counted from."""
    for session in self.sessions:
        session.keep_origin(origin)


def _refused(
    resubmit: Callable[..., Any], self: Any, message: Any, deadline: Any, lost: Any
) -> Any:
    """A request to a process that does not serve the store fails."""
    is_final = not lost.cancelled() and isinstance(lost.exception(), NotPrimaryError)
    return None if is_final else resubmit(self, message, deadline, lost)


def _once(repeated: Callable[..., Any], message: Any) -> Any:
    """A push that travels with a pull is not sent again."""
    return None if isinstance(message, Exchange) else repeated(message)


def _alone(left: Callable[..., Any], self: Any, number: int) -> Any:
    """Who had a backup leaves what it holds as if nobody else could have it."""
    found = left(self, number)
    role = StoreRole.ALONE if found.role is StoreRole.PRIMARY else found.role
    return replace(found, role=role)


def _same_life(joined: Callable[..., Any], self: Any, number: int, life: int) -> Any:
    return joined(self, number, self._processes[number].life)


def _shifted(
    take: Callable[..., Any], self: Any, channel: Any, message: Any, now: float
) -> Any:
    """Results of closures of nobody count as those of the next ones."""
    known = channel.member.in_flight
    told = [c if c.step in known else c._replace(size=0) for c in message.completions]
    return take(self, channel, replace(message, completions=told), now)


def _parted(self: Any, store: Any) -> Any:
    """A store that moves loses its backup before another one is whole."""
    if store.is_backup_at_target:
        return store.promote("it moves")
    is_leaving = store.processes[store.backup.process].is_leaving
    if store.target is None and not is_leaving:
        return []
    return store.detach("it moves")


def _no_pair(found: object) -> None:
    """No two copies are known to go on together."""


def _no_ledgers(store: Any) -> Iterator[Any]:
    return iter(())


def _treeless(original: Callable[..., None], log: Any, plan: Any) -> None:
    """A backup does not hear which variables an optimizer moves."""
    if type(plan).__name__ != "BindPlan":
        original(log, plan)


def _unversioned(original: Callable[..., Any], store: Any, change: Any) -> Any:
    """A copy begins new variables with the version 0."""
    yield from original(store, change)
    if isinstance(change, CopyVariables):
        store.variables.first_version = 0


def _undeleted(original: Callable[..., Any], store: Any, change: Any) -> Any:
    """A backup keeps what is deleted."""
    return iter(()) if isinstance(change, DeleteVariables) else original(store, change)


_COPIES: Final = "zstrat.ps.replication"
_LEDGER: Final = "zstrat.ps.store._ledger.Ledger"
_FENCES: Final = "zstrat.coordinator._fences"
_RENEWAL: Final = "zstrat.coordinator.recovery._session_renewal.SessionRenewal"
_HANDLE: Final = "zstrat.ps._service.PsService.handle"
_BEGIN: Final = "zstrat.ps.store._store.Store.change_program"
_PUSH: Final = "zstrat.worker._worker_session.WorkerSession._push"
_RESUBMIT: Final = "zstrat.ps.client._line.ServerLine.resubmit"
_LEFT: Final = f"{_COPIES}._replica_role.ReplicaRole.state_for_successor"
_JOINED: Final = "zstrat.coordinator.replication._placement.StorePlacement.joined"
_OUTCOMES: Final = "zstrat.coordinator._outcomes.Outcomes.handle"
_TELL: Final = f"{_FENCES}.Fences.send_mark"

MUTATIONS: Final[dict[str, dict[str, Any]]] = {
    "the ledger forgets": {f"{_LEDGER}.record": nothing},
    "duplicates are not looked for": {f"{_LEDGER}.is_duplicate": _no},
    "no fence is raised": {
        f"{_FENCES}.Fences.raise_to": _unfenced,
        f"{_FENCES}.Fences.up_to": _up_to_nothing,
    },
    "pushes of zombies are taken": {
        f"{_LEDGER}.close_steps": nothing,
        f"{_LEDGER}.raise_to": nothing,
    },
    "pushes are acknowledged before they are applied": {
        _HANDLE: around(_HANDLE, _early)
    },
    "updates without names are sent again": {
        "zstrat.ps.client._line._repeated": _all_resent,
        "zstrat.ps.client._pushing.OwnUpdates.begin": _unnamed,
    },
    "servers take the requests of any session": {
        "zstrat.wire._session.Ownership.check": nothing
    },
    "a restore stays in the same session": {f"{_RENEWAL}.renew_servers": _same_session},
    "the mark is raised too far": {_TELL: around(_TELL, _too_far)},
    "a step is over when its push is sent": {_PUSH: _told_early},
    "steps of lost workers are forgotten": {
        "zstrat.coordinator._queue.Queue.lost": _unlost
    },
    "a checkpoint does not wait for steps": {
        "zstrat.coordinator._session_pause.SessionPause.begin": _restless
    },
    "answers leave before the backup has it": {
        f"{_COPIES}._log_shipping.LogShipping._may_leave": True
    },
    "the ledger is not in the log": {
        f"{_COPIES}._backup.replay": partial(
            _unledgered, function(f"{_COPIES}._replay.replay")
        ),
        f"{_COPIES}._replay._ledgers": _no_ledgers,
    },
    "a view that is over is not heeded": {
        f"{_COPIES}._replica_role.ReplicaRole._step_aside": _serves_on,
        f"{_COPIES}._replica_role.ReplicaRole.require": nothing,
        f"{_COPIES}._backup.Backup.require": nothing,
    },
    "a program that goes on is taken for the one before": {
        _BEGIN: around(_BEGIN, _remembering)
    },
    "a backup does not hear of the next program": {
        f"{_COPIES}._backup.replay": partial(
            _unbegun, function(f"{_COPIES}._replay.replay")
        )
    },
    "two copies part when a program goes on": {
        "zstrat.coordinator.replication._successors._pair": _no_pair
    },
    "a server that comes later is of another session": {
        "zstrat.coordinator.replication._store_processes.StoreProcesses.keep_origin": (
            _untold
        )
    },
    "fences of the session before are raised": {f"{_FENCES}.Fences.enter": nothing},
    "trees are not bound again": {
        "zstrat.coordinator.recovery._inventory.Inventory.bound": nothing
    },
    "trees are not in the log": {
        "zstrat.ps.store._store.log_plan": partial(
            _treeless, function("zstrat.ps.store._changes.log_plan")
        )
    },
    "slots are not copied": {f"{_COPIES}._replay._slots": _no_ledgers},
    "a copy does not know the first version": {
        f"{_COPIES}._backup.replay": partial(
            _unversioned, function(f"{_COPIES}._replay.replay")
        )
    },
    "a backup keeps what is deleted": {
        f"{_COPIES}._backup.replay": partial(
            _undeleted, function(f"{_COPIES}._replay.replay")
        )
    },
    "elements do not go back": {
        "zstrat.program.trace._iterator.StepIterator.unread": nothing
    },
    "what a server refuses as it ends is not asked again": {
        _RESUBMIT: around(_RESUBMIT, _refused)
    },
    "a push that travels with a pull is not sent again": {
        "zstrat.ps.client._line._repeated": partial(
            _once, function("zstrat.ps.client._line._repeated")
        )
    },
    "a server that had a backup says it had none": {_LEFT: around(_LEFT, _alone)},
    "a server that was restarted is said to have its copies": {
        _JOINED: around(_JOINED, _same_life)
    },
    "results of closures of nobody shift the others": {
        _OUTCOMES: around(_OUTCOMES, _shifted)
    },
    "a store that moves has one copy meanwhile": {
        "zstrat.coordinator.replication._placement.StorePlacement._seek_third": _parted
    },
    "a server that has swapped goes on alone": {
        f"{_COPIES}._attached_backups.AttachedBackups.attach_whole": nothing
    },
    "versions do not jump at a promotion": {f"{_COPIES}._backup.JUMP": 0},
    **ROUND_MUTATIONS,
    **LEASE_MUTATIONS,
    **TABLE_MUTATIONS,
}
"""By name: what is replaced, and by what."""
