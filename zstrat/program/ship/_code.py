"""Python objects as bytes, between tasks of one program.

What travels how:

- functions and classes of the user's own modules (those outside of Python's library and
  of site-packages) by value, so that workers need no copy of the program, and globals
  are as they are now; everything installed by reference, and what an installed package
  made around a function of the user's over that package's globals;
- a class by its statement, which is run again where it arrives (`_classes`): what a
  metaclass or a base does when a class is made, it does there, too;
- what cannot go by value, and is an attribute of a file of the user's, by its name in
  that file and the digest of the file (`_references`);
- jax arrays as numpy arrays, made jax arrays again where they arrive; weakly typed
  ones as jax pickles them;
- a `Resource` as its number, which the receiver resolves to its own object;
- large numpy arrays of *data* beside the pickle, without a copy (protocol 5). *Code*
  (`dump_code`, and any callable) travels in one piece.

Threats. Whoever can make a task load such bytes can run code there, so a task takes
them from its coordinator alone; that is decided before anything here is called. The
bytecode of functions means nothing to another minor version of Python, so the bytes say
which one made them.

Before anything is sent it is loaded here once (`_trial`), so that what would not
arrive, or not whole, is told with the path to it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import sys
import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.errors import ProtocolError, VersionMismatchError

from ._bodies import runs_code
from ._carried import BESIDE
from ._pickler import (
    CircularBody,
    NotLoaded,
    NotShippable,
    Pickler,
    Unpickler,
    Ways,
    goes_by_name,
    is_file_of_users,
    lock,
    plain,
)
from ._pickler import Resource as Resource
from ._references import attribute
from ._trial import find_value, tried, try_out, unpicklable

if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Sequence

_MAGIC: Final = b"zs1"
# Functions travel as their instructions, which each minor version has of its own.
_VERSION: Final = bytes(sys.version_info[:2])


def dump(obj: object) -> tuple[bytes, tuple[np.ndarray, ...]]:
    """Pickles data (arguments) or code.

    Returns the bytes and the large arrays beside them, as 1-d uint8 views of the
    original memory: none if ``obj`` is callable.

    Raises:
        TypeError: A part does not travel, or not whole; names the path to it.
    """
    if callable(obj):
        return dump_code(obj), ()
    beside: list[np.ndarray] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BESIDE:
            return True
        beside.append(np.frombuffer(raw, np.uint8))
        return False

    return _dumped(obj, keep)[0], tuple(beside)


def dump_code(
    obj: object,
    held: list[Resource] | None = None,
    classes: list[type] | None = None,
) -> bytes:
    """Pickles a function, or another object that travels in one piece.

    Warns if it captures an array of more than 16 MiB.

    Args:
        held: Gets the resources that it refers to.
        classes: Gets the classes of the program that travel with it. While somebody
            holds them, they are found by a reference of the task that got the bytes.

    Raises:
        TypeError: A part does not travel, or not whole; names the path to it.
    """
    code, pickler = _dumped(obj, None)
    if classes is not None:
        classes.extend(pickler.made)
    if held is not None:
        held.extend(pickler.resources)
    for array in pickler.large:
        path = find_value(obj, array) or "an array"
        warnings.warn(
            f"{_name(obj)} captures {path}: {array.nbytes / 2**20:.0f} MiB "
            f"({array.dtype}{list(array.shape)}) that are shipped to every worker and "
            "become a constant of the compiled program. Make it a zs.Variable, or let "
            "the dataset function load it on the worker",
            stacklevel=2,
        )
    return code


def load(
    code: bytes | memoryview,
    arrays: Sequence[np.ndarray] = (),
    resolve: Callable[[int], object] | None = None,
) -> Any:
    """Inverse of `dump`. Arrays that came beside are used without a copy, read-only.

    Args:
        resolve: Gives the object of a `Resource` by its number.

    Raises:
        VersionMismatchError: Another minor version of Python made the bytes.
        ProtocolError: The bytes were not made by `dump`.
        ImportError: A class is to be imported here, which has no such source.
        Exception: Whatever unpickling raises (a module that is not installed here).
    """
    head = bytes(code[:5])
    if len(head) < 5 or head[:3] != _MAGIC:
        raise ProtocolError(f"these {len(code)} bytes are no shipped code: {head!r}")
    if head[3:] != _VERSION:
        raise VersionMismatchError(
            f"code from Python {head[3]}.{head[4]} cannot run on Python "
            f"{_VERSION[0]}.{_VERSION[1]} ({sys.executable}): run the program and all "
            "workers on the same minor version"
        )
    stream = io.BytesIO(memoryview(code)[5:])
    return Unpickler(stream, arrays, resolve).load()


def digest(code: bytes) -> bytes:
    """16 bytes that name the code."""
    return hashlib.blake2b(code, digest_size=16).digest()


def _dumped(
    obj: object, keep: Callable[[pickle.PickleBuffer], bool] | None
) -> tuple[bytes, Pickler]:
    """The bytes, and who has pickled them."""
    ways = Ways()
    with lock:
        while True:
            try:
                with Pickler.session(keep, ways) as (pickler, stream):
                    pickler.dump(obj)
                if keep is None or any(cls not in tried for cls in pickler.made):
                    try_out(obj, ways)
            except NotShippable as error:
                find_way(obj, ways, error)
                continue
            return _MAGIC + _VERSION + stream.getvalue(), pickler


def find_way(obj: object, ways: Ways, error: NotShippable) -> None:
    """Notes another way for what was refused.

    Raises:
        TypeError: There is none; names the path to it.
    """
    if error.args:
        raise TypeError(_not_whole(obj, *error.args))
    if isinstance(error.__cause__, CircularBody) and ways.late.isdisjoint(
        error.__cause__.args
    ):
        ways.late.update(error.__cause__.args)
        return
    path, chain = unpicklable(obj, functools.partial(_arrives, ways=ways))
    if isinstance(error, NotLoaded) and (cls := _made_by_code(chain, ways)):
        plain.add(cls)
        tried.add(cls)
        return
    modules = [m for m in tuple(sys.modules.values()) if is_file_of_users(m)]
    for part in (chain[-1], type(chain[-1]), *reversed(chain[:-1])):
        if id(part) not in ways.by_name and (found := attribute(part, modules)):
            ways.by_name[id(part)] = (part, found)
            return
    cause = error.__cause__
    verb = "arrive" if isinstance(error, NotLoaded) else "be pickled"
    raise TypeError(_words(obj, path, chain[-1], f"{verb} ({cause})")) from cause


def _made_by_code(chain: list[object], ways: Ways) -> type | None:
    """The innermost class that does not arrive, and whose making runs code."""
    for part in reversed(chain):
        cls = part if isinstance(part, type) else type(part)
        known = cls in plain or goes_by_name(cls) or not runs_code(cls)
        if not known and not _arrives(cls, ways):
            return cls
    return None


def _arrives(part: object, ways: Ways) -> bool:
    try:
        try_out(part, ways)
    except NotShippable as error:
        return bool(error.args)
    return True


FLAGS_ARE_NOT_HERE: Final = (
    "the flags of absl are state of a module in the program, which a worker does not "
    "have: read the flag in the program and pass its value to the step as an argument "
    "(args=(FLAGS.rate,)), or let the step capture a variable that holds it (rate = "
    "FLAGS.rate before the step)"
)


def _words(obj: object, path: str, culprit: object, reason: str) -> str:
    what = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    place = f"{path} is a {what}, which" if path else f"a {what}"
    if type(culprit).__module__.startswith("absl.flags"):
        return (
            f"{_name(obj)} cannot be shipped to another task: {place} cannot {reason}, "
            f"as {FLAGS_ARE_NOT_HERE}"
        )
    return (
        f"{_name(obj)} cannot be shipped to another task: {place} cannot {reason}. "
        f"Create it inside of the function that uses it, or capture plain "
        "data, arrays and zs.Variable objects"
    )


def _not_whole(obj: object, part: object, words: str) -> str:
    path = "it" if part is obj else find_value(obj, part) or "a part"
    kind = type(part).__qualname__
    return (
        f"{_name(obj)} would not arrive whole on another task: {path}, a {kind}, would "
        f"be another pytree there: {words}. Register {kind} in its own body or with "
        "register_pytree_node_class or register_dataclass of jax.tree_util, or import "
        "it from an installed package"
    )


def _name(obj: object) -> str:
    name = getattr(obj, "__qualname__", None)
    return repr(name) if isinstance(name, str) else f"this {type(obj).__name__}"
