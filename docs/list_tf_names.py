"""Writes docs/tf_names.toml: the public names around ``tf.distribute``, as they are.

It is run by hand, by a Python that has TensorFlow, when a new version of it is out;
zstrat and its tests read the file alone. What is written are facts: paths, members,
arguments. What zstrat has for each of them says docs/names.toml.

A member stands once, with the class highest up that has it: what a strategy has of
`tf.distribute.Strategy` is not repeated there, unless its arguments are others.

    python docs/list_tf_names.py
"""

from __future__ import annotations

import inspect
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.distribute import ps_values, sharded_variable, values
from tensorflow.python.ops import resource_variable_ops

FILE: Final = Path(__file__).resolve().with_name("tf_names.toml")
MODULES: Final = (
    "tf.distribute",
    "tf.distribute.cluster_resolver",
    "tf.distribute.coordinator",
    "tf.distribute.experimental",
    "tf.distribute.experimental.coordinator",
    "tf.distribute.experimental.partitioners",
    "tf.distribute.experimental.rpc",
    "tf.compat.v1.distribute",
    "tf.compat.v1.distribute.cluster_resolver",
    "tf.compat.v1.distribute.experimental",
)
"""All that is public in them."""

BESIDE: Final = {
    "tf.train.ClusterSpec": tf.train.ClusterSpec,
    "tf.train.ClusterDef": tf.train.ClusterDef,
    "tf.train.JobDef": tf.train.JobDef,
    "tf.train.ServerDef": tf.train.ServerDef,
    "tf.VariableAggregation": tf.VariableAggregation,
    "tf.VariableSynchronization": tf.VariableSynchronization,
    "tf.Variable": tf.Variable,
    "ResourceVariable": resource_variable_ops.BaseResourceVariable,
    "ShardedVariable": sharded_variable.ShardedVariable,
    "DistributedVariable": values.DistributedVariable,
    "PerWorkerVariable": ps_values.PerWorkerVariable,
    "CachingVariable": ps_values.CachingVariable,
    "PerReplica": values.PerReplica,
}
"""What a program of tf.distribute is given, or names elsewhere. Those without ``tf.``
are types of objects that it is given, and have no public name."""


def main() -> None:
    found = {path: _at(path) for path in _paths()} | BESIDE
    first: dict[int, str] = {}
    for path, thing in found.items():
        first.setdefault(id(thing), path)
    lines = [f"# Made by docs/list_tf_names.py of TensorFlow {tf.__version__}."]
    known = {
        thing: first[id(thing)] for thing in found.values() if inspect.isclass(thing)
    }
    for path, thing in found.items():
        lines += ["", f'["{path}"]']
        if first[id(thing)] != path:
            lines.append(f'same_as = "{first[id(thing)]}"')
        elif inspect.isclass(thing):
            lines += _class(thing, known)
        else:
            lines.append(f"arguments = {_list(_arguments(thing) or [])}")
    FILE.write_text("\n".join(lines) + "\n")


def _paths() -> list[str]:
    return [
        f"{module}.{name}"
        for module in MODULES
        for name in sorted(dir(_at(module)))
        if not name.startswith("_")
        and not isinstance(_at(f"{module}.{name}"), ModuleType)
    ]


def _at(path: str) -> Any:
    found: Any = tf
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    return found


def _class(cls: type, known: dict[type, str]) -> list[str]:
    """The lines of a class: its constructor, then members that no class above has."""
    if hasattr(cls, "DESCRIPTOR"):
        return [f'"{field.name}" = "value"' for field in cls.DESCRIPTOR.fields]
    above = [base for base in cls.__mro__[1:] if base in known]
    lines = []
    if above:
        lines.append(f"above = {_list([known[base] for base in above])}")
    made = _arguments(cls.__init__) if not issubclass(cls, Enum) else None
    if made:
        lines.append(f"arguments = {_list(made)}")
    for name in sorted(dir(cls)):
        if name.startswith("_") or (issubclass(cls, tuple) and hasattr(tuple, name)):
            continue
        kind = _kind(cls, name)
        if not any(hasattr(base, name) and _kind(base, name) == kind for base in above):
            lines.append(f'"{name}" = {kind}')
    return lines


def _kind(cls: type, name: str) -> str:
    """The arguments of a method; a word for all else."""
    member = inspect.getattr_static(cls, name)
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    arguments = _arguments(member) if callable(member) else None
    return '"value"' if arguments is None else _list(arguments)


def _arguments(function: Any) -> list[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    plain = [each.name for each in parameters if each.kind not in rest]
    return [name for name in plain if name not in ("self", "cls")]


def _list(names: Any) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


if __name__ == "__main__":
    main()
