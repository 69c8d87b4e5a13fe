"""The list of checkpoints in a folder: the file ``checkpoint`` beside them.

It says which ones are in turn to be deleted and which are the newest; whether one is
complete its own manifest says. So a list that is lost or behind (the program was killed
between the two) is made anew from what is there.
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
    """Names of checkpoints in a folder, oldest first, each with when it was saved.

    ``doomed``: to be deleted; some may be already. ``preserved_at``: when the last one
    was saved that is kept for good, of all that are called so. ``left``: what is no
    more in the list and still there, because it is kept for good, or was damaged.
    """

    saved: tuple[tuple[str, float], ...] = ()
    doomed: tuple[str, ...] = ()
    preserved_at: Mapping[str, float] = field(default_factory=dict)
    left: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.saved]

    def with_saved(self, name: str, at: float) -> SavedList:
        """The list with one more, the newest; also if it was there before."""
        others = tuple(each for each in self.saved if each[0] != name)
        doomed = tuple(each for each in self.doomed if each != name)
        left = tuple(each for each in self.left if each != name)
        return replace(self, saved=(*others, (name, at)), doomed=doomed, left=left)

    def rotated(self, prefix: str, keep: int | None, hours: float | None) -> SavedList:
        """The list, of such as are called ``prefix``, without the oldest beyond
        ``keep``, which are doomed; but for one every ``hours``, which are kept and
        leave the list."""
        saved, doomed, left = list(self.saved), list(self.doomed), list(self.left)
        preserved = dict(self.preserved_at)
        while keep is not None and len(saved) > keep:
            name, at = saved.pop(0)
            if hours is not None and at - preserved.get(prefix, 0.0) >= hours * 3600:
                preserved[prefix] = at
                left.append(name)
            else:
                doomed.append(name)
        return SavedList(tuple(saved), tuple(doomed), preserved, tuple(left))

    def with_those_of(self, prefix: str, mine: SavedList, newest: str) -> SavedList:
        """The list with all that are called ``prefix`` as ``mine`` has them; others
        stay, and stay where they are. ``newest`` goes to the end."""
        kept = set(mine.names) - {newest}
        here = [
            each
            for each in self.saved
            if prefix_of(each[0]) != prefix or each[0] in kept
        ]
        known = {name for name, _ in here}
        more = [each for each in mine.saved if each[0] not in known]
        return replace(mine, saved=(*here, *more))

    def without(self, names: set[str]) -> SavedList:
        """The list without some that are no checkpoints any more."""
        saved = tuple(each for each in self.saved if each[0] not in names)
        return replace(self, saved=saved)


def read_state(directory: str, prefix: str | None = None) -> SavedList:
    """The checkpoints in a folder that are complete: those of its list, and newer ones
    of the same names that did not get into it.

    Args:
        prefix: Only those that are called so; None: all, or those whose names are in
            the list, if there is one.
    """
    state = _stored(directory)
    found = _on_disk(directory)
    prefixes = {prefix_of(name) for name in state.names}
    if prefix is not None:
        prefixes = {prefix}
    elif not state.saved:
        prefixes = {prefix_of(name) for name in found}
    listed = [
        each
        for each in state.saved
        if each[0] in found and prefix_of(each[0]) in prefixes
    ]
    # A save that was killed before it was listed has a higher number than all that are,
    # or is newer, where the user gave the numbers. Another one was kept for good, and
    # left the list on purpose; so did what is noted as such, whatever its number.
    newest: dict[str | None, int] = {}
    last: dict[str | None, float] = {}
    for name, at in listed:
        newest[prefix_of(name)] = max(newest.get(prefix_of(name), -1), found[name][0])
        last[prefix_of(name)] = max(last.get(prefix_of(name), at), at)
    known = {*state.names, *state.doomed}
    more = [
        (number, name, at)
        for name, (number, at) in found.items()
        if name not in known
        and (name not in state.left or prefix_of(name) not in newest)
        and prefix_of(name) in prefixes
        and (
            number > newest.get(prefix_of(name), -1)
            or at > last.get(prefix_of(name), math.inf)
        )
    ]
    for _, name, at in sorted(more):
        listed.insert(_place(listed, name, at), (name, at))
    return replace(state, saved=tuple(listed))


def _place(saved: list[tuple[str, float]], name: str, at: float) -> int:
    """Where one that is not listed comes: behind those of its name, whose numbers are
    lower, and behind what was saved before it under other names."""
    prefix = prefix_of(name)
    before = (
        number
        for number, (other, when) in enumerate(saved, start=1)
        if when <= at or prefix_of(other) == prefix
    )
    return max(before, default=0)


def update_state(directory: str, change: Callable[[SavedList], SavedList]) -> SavedList:
    """Reads, changes and replaces the list; only for who holds the folder's lock.

    Raises:
        ResourceExhaustedError, OSError: As the system says; the list is as it was.
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
    """The right to save to a folder, for as long as the lock is referred to.

    Savers of one process share it: there the steps of the program say who is next.

    Raises:
        BusyError: Another process saves there; says which.
    """
    path = os.path.join(os.path.realpath(directory), _LOCK)
    with _changing:
        # Held by reference alone, so a manager that is dropped without `close` lets go.
        lock = _writers.get(path)
        if lock is None:
            lock = _writers[path] = FolderLock(path)
    return lock


def prefix_of(name: str) -> str | None:
    """What a checkpoint is called without its number; None: it has none."""
    numbered = _NUMBERED.fullmatch(name)
    return None if numbered is None else numbered[1]


def name_given(name: Any) -> str:
    """What a caller calls checkpoints.

    Raises:
        TypeError: It is no text, as a name of files is.
    """
    try:
        return os.fsdecode(name)
    except TypeError:
        raise TypeError(f"checkpoint_name={name!r}: expected text") from None


def clean(directory: str, prefix: str) -> None:
    """Removes what savers left that were killed; only for who holds the lock."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            # Of a writer that was killed between writing the list and giving it its
            # name.
            if re.fullmatch(rf"{STATE}\.\w+\.tmp", name):
                os.unlink(path)
            elif prefix_of(name) == prefix and os.path.isdir(path) and sweep(path):
                log.info("removed %s: it was never completed", path)


_changing: Final = threading.Lock()
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
    match plain:
        case {
            "format": "zstrat.checkpoints",
            "saved": list(saved),
            "doomed": list(doomed),
            "preserved_at": preserved,
        } if all(_is_entry(each) for each in saved):
            plainly = tuple((name, float(at)) for name, at in saved)
            left = plain.get("left", [])  # lists of before have none
            return SavedList(
                plainly, _names(doomed), _preserved(preserved), _names(left)
            )
    log.warning(
        "%s is damaged, or another program's; the checkpoints are listed from what is "
        "in the folder",
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
    """Whether the name is that of a checkpoint in the folder, and no way out of it:
    what is doomed is deleted."""
    return (
        isinstance(name, str)
        and _NUMBERED.fullmatch(name) is not None
        and ("/" not in name)
    )


def _on_disk(directory: str) -> dict[str, tuple[int, float]]:
    """Complete checkpoints: name -> (number, when)."""
    found = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(directory):
            numbered = _NUMBERED.fullmatch(name)
            if numbered is None:
                continue
            with contextlib.suppress(OSError):
                at = os.stat(os.path.join(directory, name, MANIFEST)).st_mtime
                found[name] = (int(numbered[2]), at)
    return found
