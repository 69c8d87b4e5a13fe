"""What Python and numpy would do with a result that was not fetched is refused.

Law of the file: nothing waits for a result that the program did not fetch. That a step
is over is something to wait for in one place, at the line that says so.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Final, NoReturn

import jax

if TYPE_CHECKING:
    from collections.abc import Callable

_OF_ARRAYS: Final = frozenset(name for name in dir(jax.Array) if name[0] != "_")


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Unfetched, *_: Any) -> NoReturn:
        raise TypeError(f"no {what} of {self._advice()}")

    return refuse


class Unfetched(abc.ABC):
    """A value of another process, with which nothing can be computed as it is."""

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
