"""Placeholders that refuse use: coordinators on a worker, unfetched results in a
program.

A step that is a method is pickled with its object, which may have a coordinator or a
dataset as an attribute. Unpickled on the worker, a coordinator has its strategy only;
any other use of it raises an error that says so. In the program, `Unfetched` refuses to
compute with a result that was not fetched.
"""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import jax

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class CoordinatorOnWorker:
    """A coordinator on a worker: has its ``strategy``, and raises an error at any other
    use."""

    def __init__(self, strategy: Any, kind: type) -> None:
        self.strategy = strategy
        self._kind = kind

    def __getattr__(self, name: str) -> NoReturn:
        # AttributeError for what no coordinator has, so that `hasattr` and `copy` work.
        if name.startswith("_") or name not in dir(self._kind):
            raise AttributeError(
                f"{self._kind.__name__} has no attribute {name!r}", name=name, obj=self
            )
        raise RuntimeError(in_step(f"coordinator.{name}"))

    def __repr__(self) -> str:
        return f"<zstrat.{self._kind.__name__} on a worker: has only its strategy>"


@functools.cache
def coordinator_on_worker(strategy: Any, kind: type) -> CoordinatorOnWorker:
    """Returns the placeholder of a coordinator in this process: one per strategy, as in
    the program."""
    return CoordinatorOnWorker(strategy, kind)


@final
class DatasetOnWorker:
    """A `PerWorkerDataset` on a worker: raises an error at any use, as steps take its
    iterators."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> NoReturn:
        raise RuntimeError(in_step(f"iter() of {self._name}"))

    def build(self) -> NoReturn:
        """Raises RuntimeError: a step runs on a worker and cannot use the dataset."""
        raise RuntimeError(in_step(f"build() of {self._name}"))

    @property
    def element_spec(self) -> NoReturn:
        """Raises RuntimeError: a step runs on a worker and cannot use the dataset."""
        raise RuntimeError(in_step(f"element_spec of {self._name}"))


def in_step(what: str) -> str:
    """Returns the message of an error for use of the coordinator in a step."""
    return (
        f"{what} is used in a step function, which runs on a worker. Use it outside of "
        "the step, in the program that schedules, and pass the step what it needs as "
        "arguments"
    )


_ARRAY_ATTRIBUTES: Final = frozenset(name for name in dir(jax.Array) if name[0] != "_")


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Unfetched, *_: Any) -> NoReturn:
        raise TypeError(f"no {what} of {self._advice()}")

    return refuse


class Unfetched(abc.ABC):
    """A value of another process. Operators, numpy and conversions raise an error that
    says how to fetch the value, instead of waiting for it."""

    __slots__ = ()

    @abc.abstractmethod
    def _advice(self) -> str:
        """Describes the value, and how to fetch its result."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        del dtype, copy
        raise TypeError(f"no array of {self._advice()}")

    def __array_ufunc__(self, ufunc: Any, *_: Any, **options: Any) -> NoReturn:
        del options
        raise TypeError(f"no np.{ufunc.__name__} of {self._advice()}")

    def __format__(self, how: str) -> str:
        if how:
            raise TypeError(f"no format {how!r} of {self._advice()}")
        return str(self)

    def __getattr__(self, name: str) -> NoReturn:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in _ARRAY_ATTRIBUTES:
            message = f"{message}: {self._advice()}"
        raise AttributeError(message, name=name, obj=self)

    # On the class, as Python looks operators up there and never calls `__getattr__` for
    # them.
    __float__ = _refused("float()")
    __int__ = _refused("int()")
    __complex__ = _refused("complex()")
    __index__ = _refused("index")
    __len__ = _refused("len()")
    __round__ = _refused("round()")
    __getitem__ = _refused("item")
    __add__ = __radd__ = _refused("arithmetic (+)")
    __sub__ = __rsub__ = _refused("arithmetic (-)")
    __mul__ = __rmul__ = _refused("arithmetic (*)")
    __truediv__ = __rtruediv__ = _refused("arithmetic (/)")
    __floordiv__ = __rfloordiv__ = _refused("arithmetic (//)")
    __mod__ = __rmod__ = _refused("arithmetic (%)")
    __pow__ = __rpow__ = _refused("arithmetic (**)")
    __matmul__ = __rmatmul__ = _refused("arithmetic (@)")
    __neg__ = __pos__ = __abs__ = _refused("arithmetic")
    __lt__ = __le__ = __gt__ = __ge__ = _refused("comparison")

    def __bool__(self) -> bool:
        return True  # like any object, although it defines __len__
