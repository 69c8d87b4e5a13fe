"""Pickles Python objects between tasks of one program: `dump`, `dump_code`, `load`.

How objects are pickled:

- functions and classes of the user's own modules (those outside of Python's library and
  of site-packages) by value, so that workers need no copy of the program, and globals
  have their present values; everything installed by reference; functions that an
  installed package makes around a user's function over that package's globals;
- classes by their statement, which the receiver runs again (`_classes`), so that a
  metaclass or a base does its work there, too;
- objects that cannot be pickled by value, and are attributes of a user's file, by name
  and the digest of the file (`_references`);
- jax arrays as numpy arrays, which the receiver converts; weakly typed ones as jax
  pickles them;
- a `Resource` as its number, which the receiver resolves to its own object;
- large numpy arrays of *data* outside of the pickle, without a copy (protocol 5).
  *Code* (`dump_code`, and any callable) is one piece.

Threats. Anyone who can make a task load such bytes can run code there, so tasks accept
them only from their coordinator; the caller has checked that. Bytecode of functions is
valid only for one minor version of Python, so the bytes name it.

Before an object is sent it is loaded here once (`_carried`), so that errors name the
path to a part that would not arrive, or not whole.
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

from ._carried import BESIDE, find_value, tried, try_out, unpicklable
from ._functions import runs_code
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

if TYPE_CHECKING:
    import pickle
    from collections.abc import Callable, Sequence

_MAGIC: Final = b"zs1"
# Functions are pickled as bytecode, which differs between minor versions.
_VERSION: Final = bytes(sys.version_info[:2])


def dump(obj: object) -> tuple[bytes, tuple[np.ndarray, ...]]:
    """Pickles data (arguments) or code.

    Returns the bytes, and large arrays as 1-d uint8 views of the original memory (no
    arrays if ``obj`` is callable).

    Raises:
        TypeError: A part cannot be pickled, or would not arrive complete; names its
            path.
    """
    # A function is one piece, as its bytes are known by one digest.
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
    """Pickles a function, or another object, in one piece.

    Warns if the object captures an array of more than 16 MiB.

    Args:
        held: A list to which the resources are added that the object refers to.
        classes: A list to which the classes are added that are pickled by value. While
            they are alive, references from the receiver find them.

    Raises:
        TypeError: A part cannot be pickled, or would not arrive complete; names its
            path.
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
    """Loads an object that `dump` has pickled. The separate arrays are used without a
    copy, read-only.

    Args:
        resolve: Returns the object of a `Resource` by its number.

    Raises:
        VersionMismatchError: Another minor version of Python made the bytes.
        ProtocolError: The bytes were not made by `dump`.
        ImportError: A class must be imported, and its source is not in this process.
        Exception: Whatever unpickling raises (a module that is not installed here).
    """
    head = bytes(code[:5])
    if len(head) < 5 or head[:3] != _MAGIC:
        raise ProtocolError(
            f"{len(code)} bytes of code begin with {head!r}: expected {_MAGIC!r}"
        )
    if head[3:] != _VERSION:
        raise VersionMismatchError(
            f"code from Python {head[3]}.{head[4]} cannot run on Python "
            f"{_VERSION[0]}.{_VERSION[1]} ({sys.executable}): run the program and all "
            "workers on the same minor version"
        )
    stream = io.BytesIO(memoryview(code)[5:])
    return Unpickler(stream, arrays, resolve).load()


def digest(code: bytes) -> bytes:
    """Returns a digest of the code, 16 bytes."""
    return hashlib.blake2b(code, digest_size=16).digest()


def _dumped(
    obj: object, keep: Callable[[pickle.PickleBuffer], bool] | None
) -> tuple[bytes, Pickler]:
    """Pickles an object; returns the bytes and the pickler, which has the separate
    arrays."""
    ways = Ways()
    with lock:
        # Each failure adds an exception to `ways` or raises, so this ends.
        while True:
            try:
                with Pickler.session(keep, ways) as (pickler, stream):
                    pickler.dump(obj)
                # Data is tried only for classes that were not tried before.
                if keep is None or any(cls not in tried for cls in pickler.made):
                    try_out(obj, ways)
            except NotShippable as error:
                find_way(obj, ways, error)
                continue
            return _MAGIC + _VERSION + stream.getvalue(), pickler


def find_way(obj: object, ways: Ways, error: NotShippable) -> None:
    """Finds another way to pickle the part of an object that failed, and adds it to
    ``ways``.

    Raises:
        TypeError: There is no other way; names the path to the part.
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
        # Its statement cannot run again, so cloudpickle fills a blank class.
        plain.add(cls)
        tried.add(cls)
        return
    # A copy, as imports in other threads change the dict.
    modules = [m for m in tuple(sys.modules.values()) if is_file_of_users(m)]
    # The innermost part first: as little as possible is imported by name.
    for part in (chain[-1], type(chain[-1]), *reversed(chain[:-1])):
        if id(part) not in ways.by_name and (reference := attribute(part, modules)):
            ways.by_name[id(part)] = (part, reference)
            return
    cause = error.__cause__
    verb = "arrive" if isinstance(error, NotLoaded) else "be pickled"
    raise TypeError(_words(obj, path, chain[-1], f"{verb} ({cause})")) from cause


def _made_by_code(chain: list[object], ways: Ways) -> type | None:
    """Returns the innermost class along ``chain`` that fails to arrive and runs code
    when it is made; None if there is none."""
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
        # It arrives, but changed: that is another error, which names it.
        return bool(error.args)
    return True


FLAGS_ARE_NOT_HERE: Final = (
    "flags of absl are state of a module in the program, which workers do not have: "
    "read the flag in the program and pass its value to the step as an argument "
    "(args=(FLAGS.rate,)), or let the step capture a Python variable with the value "
    "(rate = FLAGS.rate before the step)"
)


def _words(obj: object, path: str, culprit: object, reason: str) -> str:
    what = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    place = f"{path} is a {what}, which" if path else f"a {what}"
    if type(culprit).__module__.startswith("absl.flags"):
        return (
            f"{_name(obj)} cannot be shipped to another task: {place} cannot {reason}, "
            f"because {FLAGS_ARE_NOT_HERE}"
        )
    return (
        f"{_name(obj)} cannot be shipped to another task: {place} cannot {reason}. "
        "Create it inside of the function that uses it, or capture only plain data, "
        "arrays and zs.Variable objects"
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
