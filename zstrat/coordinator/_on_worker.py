"""What stands on a worker for things of the coordinator that an object holds.

A step that is a method travels with its object, and objects keep their coordinator and
their datasets at hand. On the worker nothing can be done with them but to ask for the
strategy: anything else raises an error that says so. The other way round, nothing can
be done in the program with a result that it has not fetched (`Unfetched`).
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
    """A coordinator on a worker: it has its ``strategy``, and refuses the rest."""

    def __init__(self, strategy: Any, kind: type) -> None:
        self.strategy = strategy
        self._kind = kind

    def __getattr__(self, name: str) -> NoReturn:
        # Of what no coordinator has, as of any object; so `hasattr` and `copy` work.
        if name.startswith("_") or name not in dir(self._kind):
            raise AttributeError(
                f"{self._kind.__name__} has no attribute {name!r}", name=name, obj=self
            )
        raise RuntimeError(in_step(f"coordinator.{name}"))

    def __repr__(self) -> str:
        return f"<zstrat.{self._kind.__name__} on a worker: it has its strategy alone>"


@functools.cache
def coordinator_on_worker(strategy: Any, kind: type) -> CoordinatorOnWorker:
    """The stand-in of this process; one object per strategy, as on the coordinator."""
    return CoordinatorOnWorker(strategy, kind)


@final
class DatasetOnWorker:
    """A `PerWorkerDataset` on a worker, which has iterators of it alone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> NoReturn:
        raise RuntimeError(in_step(f"iter() of {self._name}"))

    def build(self) -> NoReturn:
        """Refused; see the class."""
        raise RuntimeError(in_step(f"build() of {self._name}"))

    @property
    def element_spec(self) -> NoReturn:
        """Refused; see the class."""
        raise RuntimeError(in_step(f"element_spec of {self._name}"))


def in_step(what: str) -> str:
    """Why something of the coordinator is refused in a step."""
    return (
        f"{what} is used in a step function, which runs on a worker: that belongs to "
        "the program that schedules. Use it outside of the step, and give the step "
        "what it needs as arguments"
    )


_OF_ARRAYS: Final = frozenset(name for name in dir(jax.Array) if name[0] != "_")


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Unfetched, *_: Any) -> NoReturn:
        raise TypeError(f"no {what} of {self._advice()}")

    return refuse


class Unfetched(abc.ABC):
    """A value of another process, with which nothing can be computed as it is: what
    Python and numpy would do with it is refused, and nothing waits that the program did
    not ask to wait."""

    __slots__ = ()

    @abc.abstractmethod
    def _advice(self) -> str:
        """Says what it is, and what gives its value."""

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
        words = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in _OF_ARRAYS:
            words = f"{words}: {self._advice()}"
        raise AttributeError(words, name=name, obj=self)

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
        return True  # as of any object, for all that there is a length
