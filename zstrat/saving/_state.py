"""The list of checkpoints in a folder: the file ``checkpoint`` beside them.

The list says which checkpoints are the newest, and which are deleted next; whether a
checkpoint is complete is said by its own manifest. So a list that is lost or out of
date (the program was killed before it wrote the list) is rebuilt from the folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import threading
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from zstrat.checkpoint import MANIFEST, FolderLock, blamed, replace_file, sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger("zstrat.saving")

STATE: Final = "checkpoint"
_FORMAT: Final = "zstrat.checkpoints"
_LOCK: Final = ".checkpoint.lock"
_NUMBERED: Final = re.compile(r"(.*)-(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SavedList:
    """Names of checkpoints in a folder, oldest first, each with the time of its save.

    ``doomed``: checkpoints to be deleted; some may be deleted already.
    ``preserved_at``: by prefix, the time of the newest checkpoint that is kept
    permanently. ``left``: checkpoints that are no longer listed and still exist: they
    are kept permanently, or were damaged.
    """

    saved: tuple[tuple[str, float], ...] = ()
    doomed: tuple[str, ...] = ()
    preserved_at: Mapping[str, float] = field(default_factory=dict)
    left: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.saved]

    def with_saved(self, name: str, at: float) -> SavedList:
        """Returns the list with the checkpoint ``name`` as its newest."""
        others = tuple(entry for entry in self.saved if entry[0] != name)
        doomed = tuple(other for other in self.doomed if other != name)
        left = tuple(other for other in self.left if other != name)
        return replace(self, saved=(*others, (name, at)), doomed=doomed, left=left)

    def rotated(self, prefix: str, keep: int | None, hours: float | None) -> SavedList:
        """Returns the list, whose names must all have this ``prefix``, with only the
        newest ``keep`` checkpoints. Older ones are moved to ``doomed``, except one
        every ``hours``, which is moved to ``left``."""
        saved, doomed, left = list(self.saved), list(self.doomed), list(self.left)
        preserved = dict(self.preserved_at)
        while keep is not None and len(saved) > keep:
            name, at = saved.pop(0)
            # By times of saves, not of this call: a manager that rotates late keeps
            # the same checkpoints.
            if hours is not None and at - preserved.get(prefix, 0.0) >= hours * 3600:
                preserved[prefix] = at
                left.append(name)
            else:
                doomed.append(name)
        return SavedList(tuple(saved), tuple(doomed), preserved, tuple(left))

    def with_those_of(self, prefix: str, own: SavedList, newest: str) -> SavedList:
        """Returns this list with its checkpoints of the name ``prefix`` replaced by
        those of ``own``; checkpoints of other names stay, in their order. ``newest`` is
        moved to the end."""
        kept = set(own.names) - {newest}
        here = [
            (name, at)
            for name, at in self.saved
            if prefix_of(name) != prefix or name in kept
        ]
        known = {name for name, _ in here}
        more = [entry for entry in own.saved if entry[0] not in known]
        return replace(own, saved=(*here, *more))

    def without(self, names: set[str]) -> SavedList:
        """Returns the list without the checkpoints of these names, which are
        damaged."""
        saved = tuple(entry for entry in self.saved if entry[0] not in names)
        return replace(self, saved=saved)


def read_state(directory: str, prefix: str | None = None) -> SavedList:
    """Returns the complete checkpoints of a folder: those of its list, and newer ones
    of the same names that are not in the list.

    Args:
        prefix: Only checkpoints of this name; None: those of the names in the list, or
            all if there is no list.
    """
    state = _stored(directory)
    on_disk = _on_disk(directory)
    prefixes = {prefix_of(name) for name in state.names}
    if prefix is not None:
        prefixes = {prefix}
    elif not state.saved:
        prefixes = {prefix_of(name) for name in on_disk}
    listed = [
        (name, at)
        for name, at in state.saved
        if name in on_disk and prefix_of(name) in prefixes
    ]
    # A save that was killed before it was listed has a higher number than all that are,
    # or is newer, where the user gave the numbers. Any other one left the list on
    # purpose: it was kept for good, or is in `left`, whatever its number.
    newest: dict[str | None, int] = {}
    last: dict[str | None, float] = {}
    for name, at in listed:
        newest[prefix_of(name)] = max(newest.get(prefix_of(name), -1), on_disk[name][0])
        last[prefix_of(name)] = max(last.get(prefix_of(name), at), at)
    known = {*state.names, *state.doomed}
    more = [
        (number, name, at)
        for name, (number, at) in on_disk.items()
        if name not in known
        and (name not in state.left or prefix_of(name) not in newest)
        and prefix_of(name) in prefixes
        and (
            number > newest.get(prefix_of(name), -1)
            or at > last.get(prefix_of(name), math.inf)
        )
    ]
    for _, name, at in sorted(more):
        listed.insert(_index_of(listed, name, at), (name, at))
    return replace(state, saved=tuple(listed))


def _index_of(saved: list[tuple[str, float]], name: str, at: float) -> int:
    """Returns the index at which to insert an unlisted checkpoint: after those of its
    name, whose numbers are lower, and after earlier ones of other names."""
    prefix = prefix_of(name)
    before = (
        number
        for number, (other, when) in enumerate(saved, start=1)
        if when <= at or prefix_of(other) == prefix
    )
    return max(before, default=0)


def update_state(directory: str, change: Callable[[SavedList], SavedList]) -> SavedList:
    """Replaces the folder's list by ``change(list)``. The caller holds the lock of the
    folder.

    Raises:
        ResourceExhaustedError, OSError: As reported by the system; the list is
            unchanged.
    """
    with _changing:
        state = change(_stored(directory))
        plain = {
            "format": _FORMAT,
            "version": 1,
            "latest": state.names[-1] if state.saved else None,
            "saved": state.saved,
            "doomed": state.doomed,
            "preserved_at": state.preserved_at,
            "left": state.left,
        }
        data = json.dumps(plain, indent=1).encode() + b"\n"
        path = os.path.join(directory, STATE)
        replace_file(path, data, mark=secrets.token_hex(4))
    return state


def writer_of(directory: str) -> FolderLock:
    """Acquires the right to save to a folder, for as long as the returned lock is
    referenced.

    Saves in one process share the lock: the program itself orders its saves.

    Raises:
        BusyError: Another process saves to the folder; says which.
    """
    path = os.path.join(os.path.realpath(directory), _LOCK)
    with _changing:
        # Held by reference alone: a manager dropped without `close` releases it.
        lock = _writers.get(path)
        if lock is None:
            lock = _writers[path] = FolderLock(path)
    return lock


def prefix_of(name: str) -> str | None:
    """Returns the name of a checkpoint without its number; None: it has no number."""
    numbered = _NUMBERED.fullmatch(name)
    return None if numbered is None else numbered[1]


def name_given(name: Any) -> str:
    """Checks and returns the name that a caller gives to checkpoints.

    Raises:
        TypeError: The name is not text.
    """
    try:
        return os.fsdecode(name)
    except TypeError:
        raise TypeError(f"checkpoint_name={name!r}: expected text") from None


def clean(directory: str, prefix: str) -> None:
    """Removes incomplete files that killed programs have left. The caller holds the
    lock of the folder."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            # Its writer was killed between writing the list and renaming it.
            if re.fullmatch(rf"{STATE}\.\w+\.tmp", name):
                os.unlink(path)
            elif prefix_of(name) == prefix and os.path.isdir(path) and sweep(path):
                log.info("removed %s: it was never completed", path)


_changing: Final = threading.Lock()
"""Serializes changes by managers in several threads, which share the list and the lock
of a folder."""
_writers: Final[weakref.WeakValueDictionary[str, FolderLock]] = (
    weakref.WeakValueDictionary()
)


def _stored(directory: str) -> SavedList:
    path = os.path.join(directory, STATE)
    with blamed(path, "reading"):
        try:
            with open(path, "rb") as file:
                plain: Any = json.load(file)
        except FileNotFoundError:
            return SavedList()
        except ValueError:
            plain = None
    # Damage only warns: the checkpoints are complete without the list.
    match plain:
        case {
            "format": "zstrat.checkpoints",
            "saved": list(saved),
            "doomed": list(doomed),
            "preserved_at": preserved,
        } if all(map(_is_entry, saved)):
            entries = tuple((name, float(at)) for name, at in saved)
            left = plain.get("left", [])  # older lists lack it
            return SavedList(
                entries, _names(doomed), _preserved(preserved), _names(left)
            )
    log.warning(
        "%s is damaged, or of another program; the checkpoints are listed from the "
        "folder",
        path,
    )
    return SavedList()


def _is_entry(entry: Any) -> bool:
    match entry:
        case [str(name), int() | float()]:
            return _is_name(name)
    return False


def _preserved(plain: Any) -> dict[str, float]:
    if not isinstance(plain, dict):
        return {}
    return {x: float(at) for x, at in plain.items() if isinstance(at, int | float)}


def _names(plain: Any) -> tuple[str, ...]:
    return tuple(x for x in plain if _is_name(x)) if isinstance(plain, list) else ()


def _is_name(name: Any) -> bool:
    """Returns whether the name is that of a checkpoint in the folder itself: a path
    elsewhere must not be deleted."""
    return (
        isinstance(name, str)
        and _NUMBERED.fullmatch(name) is not None
        and ("/" not in name)
    )


def _on_disk(directory: str) -> dict[str, tuple[int, float]]:
    """Returns the number and the time of each complete checkpoint, by name."""
    complete = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(directory):
            numbered = _NUMBERED.fullmatch(name)
            if numbered is None:
                continue
            with contextlib.suppress(OSError):
                # Of the manifest: it is written last, when the checkpoint is complete.
                at = os.stat(os.path.join(directory, name, MANIFEST)).st_mtime
                complete[name] = (int(numbered[2]), at)
    return complete
