"""Parameters written once, for the blocking and the awaitable form of a call."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


def parameters_of(
    signed: Callable[Concatenate[Any, P], object],
) -> Callable[
    [Callable[Concatenate[Owner, ...], Result]], Callable[Concatenate[Owner, P], Result]
]:
    """A decorator for a method that hands all of its arguments on to ``signed``.

    mypy, editors and `inspect.signature` show the parameters of ``signed``, their types
    and their defaults. The method keeps its own first parameter and what it returns.
    """

    def sign(
        method: Callable[Concatenate[Owner, ...], Result],
    ) -> Callable[Concatenate[Owner, P], Result]:
        own, taken = inspect.signature(method), inspect.signature(signed)
        first = next(iter(own.parameters.values()))
        rest = list(taken.parameters.values())[1:]
        method.__signature__ = own.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
        return method

    return sign
