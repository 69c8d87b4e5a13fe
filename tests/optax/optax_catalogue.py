"""Every public transformation of the optax that is installed, found by introspection.

A public name is a transformation if it says so (the annotation of what it returns), or
if what it returns, called with arguments made up from the names of its parameters, has
``init`` and ``update``. What needs more has a recipe. What is neither known to be one
nor known to be none is an error that asks for a recipe: a new optax is tried whole.
"""

from __future__ import annotations

import inspect
import pkgutil
import types
import warnings
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax
import optax
from optax_model import kernels, schedule
from optax_programs import PROGRAMS, ROWS
from optax_recipes import NO_TRANSFORMATIONS, Case, recipes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "learning_rate": lambda: 0.1,
    "step_size": lambda: -0.1,
    "step_size_fn": schedule,
    "decay": lambda: 0.9,
    "max_norm": lambda: 0.2,
    "max_delta": lambda: 0.2,
    "threshold": lambda: 0.1,
    "clipping": lambda: 0.05,
    "eta": lambda: 0.1,
    "gamma": lambda: 0.5,
    "key": lambda: jax.random.key(2),
    "inner": lambda: optax.adam(0.1),
    "opt": lambda: optax.adam(0.1),
    "tx": lambda: optax.adam(0.1),
    "optimizer": lambda: optax.adam(0.1),
    "base_optimizer": lambda: optax.sgd(0.1),
    "mask": lambda: kernels,
    "weight_decay": lambda: 0.1,
}
"""What a parameter of this name gets where it has to have something, and ``key``."""

_MASKS = ("mask", "weight_decay_mask", "trust_ratio_mask")


class RecipeMissing(Exception):
    """Its lines are the names of which nobody says what they are."""


@dataclass(frozen=True)
class Name:
    """One public object: its names without ``optax.``, the shortest first."""

    names: tuple[str, ...]
    thing: Any

    @property
    def public(self) -> str:
        return self.names[0]


@cache
def public_names() -> tuple[Name, ...]:
    """All classes and functions of optax's own that its public modules show."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for module in _modules(optax):
        for word in _public(module):
            thing = getattr(module, word)
            if not callable(thing) or not _is_optax(thing):
                continue
            path = f"{module.__name__}.{word}".removeprefix("optax.")
            found.setdefault(id(thing), (thing, []))[1].append(
                path.replace("experimental._", "experimental.")
            )
    return tuple(
        Name(tuple(sorted(set(names), key=lambda n: (n.count("."), n))), thing)
        for thing, names in found.values()
    )


@cache
def transformations() -> dict[str, list[Case]]:
    """The cases of each public name that is a transformation.

    Raises:
        RecipeMissing: Something may be one, and nothing says how it is built.
    """
    found: dict[str, list[Case]] = {}
    missing = []
    for name in public_names():
        try:
            cases = _cases(name)
        except RecipeMissing as error:
            missing.append(str(error))
            continue
        if cases:
            found[name.public] = cases
    if missing:
        raise RecipeMissing("\n".join(missing))
    return dict(sorted(found.items()))


def every_case() -> list[Case]:
    """Those of all public names, and the programs."""
    listed = [case for cases in transformations().values() for case in cases]
    return [*PROGRAMS, *ROWS, *listed]


def built(case: Case) -> Any:
    """The transformation, as optax has it: with ``init`` and ``update``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = case.make()
    if isinstance(made, optax.GradientTransformation):
        return made
    return made.gradient_transformation()


def _modules(module: types.ModuleType) -> Iterator[types.ModuleType]:
    yield module
    for found in pkgutil.iter_modules(module.__path__):
        if not found.name.startswith("_") and not found.name.endswith("_test"):
            inner = import_module(f"{module.__name__}.{found.name}")
            if hasattr(inner, "__path__"):
                yield from _modules(inner)
            else:
                yield inner
    for word in _public(module):
        # ``experimental.aggregating`` is a private module under a public name.
        inner = getattr(module, word)
        if isinstance(inner, types.ModuleType) and "._" in inner.__name__:
            yield inner


def _public(module: types.ModuleType) -> list[str]:
    return [word for word in dir(module) if not word.startswith("_")]


def _is_optax(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == "optax"


def _cases(name: Name) -> list[Case]:
    written = [case for known in name.names for case in recipes(known)]
    if not written and _is_listed(name) and not _says_one(name.thing):
        return []
    if inspect.isclass(name.thing):
        if not written and _is_builder(name.thing):
            raise RecipeMissing(_ask(name, "is a class with init and update"))
        found = written
    else:
        found = written or _called(name)
        found = [*found, *_masked(name, found[0])] if found else []
    return [replace(case, covers=name.public) for case in found]


def _is_builder(thing: Any) -> bool:
    """A class whose objects have the two methods, as `optax.MultiSteps` has."""
    if getattr(thing, "_is_protocol", False) or issubclass(thing, tuple):
        return hasattr(thing, "init") and hasattr(thing, "update")
    return callable(getattr(thing, "update", None))


def _called(name: Name) -> list[Case]:
    """What comes of arguments with the names of its parameters."""
    says_one = _says_one(name.thing)
    if not says_one and _says_something_else(name.thing):
        return []
    make = partial(_call, name.thing, _arguments(name.thing))
    try:
        made = make()
    except Exception as error:  # becomes the error that asks for a recipe
        raise RecipeMissing(_ask(name, f"cannot be called: {error!r:.120}")) from error
    if isinstance(made, optax.GradientTransformation):
        return [Case(name.public, make)]
    if says_one or callable(getattr(made, "update", None)):
        raise RecipeMissing(_ask(name, f"gives {type(made).__name__}"))
    return []


def _is_listed(name: Name) -> bool:
    return any(
        fnmatch(known, pattern)
        for known in name.names
        for pattern in NO_TRANSFORMATIONS
    )


def _said(thing: Any) -> str:
    return str(getattr(thing, "__annotations__", {}).get("return", ""))


def _says_one(thing: Any) -> bool:
    return not inspect.isclass(thing) and "GradientTransformation" in _said(thing)


def _says_something_else(thing: Any) -> bool:
    """An array, a tree, a number. A function may be a factory: it is called."""
    said = _said(thing)
    return bool(said) and "Callable" not in said and said not in ("Any", "typing.Any")


def _arguments(thing: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for parameter in inspect.signature(thing).parameters.values():
        word = parameter.name
        required = parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if word == "learning_rate" and "Callable" in str(parameter.annotation):
            given[word] = schedule()
        elif (required and word in _ARGUMENTS) or word == "key":
            given[word] = _ARGUMENTS[word]()
        elif word == "weight_decay" and parameter.default is not parameter.empty:
            given[word] = 0.1
    return given


def _masked(name: Name, like: Case) -> list[Case]:
    """One case more for each parameter that is a mask: by path."""
    words = [w for w in inspect.signature(name.thing).parameters if w in _MASKS]
    try:
        given = _arguments(name.thing)
        _call(name.thing, given)
    except Exception:  # what has a recipe and no other way to be built
        return []
    return [
        replace(
            like,
            name=f"{name.public}({word} by path)",
            make=partial(_call, name.thing, {**given, word: kernels}),
        )
        for word in words
    ]


def _call(thing: Any, given: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return thing(**given)


def _ask(name: Name, why: str) -> str:
    return (
        f"optax.{name.public} {why}: is it a transformation? Then add a recipe to "
        "RECIPES of tests/optax/optax_recipes.py; if it is none, add it to "
        "NO_TRANSFORMATIONS with the reason"
    )
