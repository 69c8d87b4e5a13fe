"""Arithmetic on variables: every operator acts on the value.

Law of the file: an operator reads the variable once and leaves the rest to numpy (on
the coordinator) or jax (inside a step). There is no in-place arithmetic: ``v += 1``
would rebind the name, so it is refused with words.
"""

from __future__ import annotations

import abc
import operator
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

import jax
import numpy as np

from ._tracing import asked_hash, recorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

_OF_ARRAYS: Final = frozenset(name for name in dir(jax.Array) if name[0] != "_")


class ArrayOperators(abc.ABC):
    """Python's operators for something that has a value."""

    __slots__ = ()

    # Higher than jax.Array's 100: numpy must leave ``ndarray * variable`` to us.
    __array_priority__ = 200

    @abc.abstractmethod
    def value(self) -> Any:
        """The array that the operators act on."""

    @property
    def __jax_array__(self) -> Callable[[], jax.Array]:
        """The value for functions of jax that ask for it, as ``jnp.asarray``.

        Raises:
            ValueError: Outside of steps: one asks that takes arrays alone, and would
                refuse in words of which no user can do.
        """
        # jax asks here, too, before it refuses what it compiles a function for. In a
        # step its error is put into words that name the step.
        if recorder.get() is None and _refuses(sys._getframe(1).f_code):
            raise ValueError(  # a TypeError would be replaced by one of jax
                f"{self!r:.100} is passed to a function that jax compiles (jnp.exp, "
                "jnp.mean, jax.nn.relu, jax.jit, jax.grad, ...), which takes arrays: "
                "write v.value(), or zs.values(tree) for a pytree, "
                "jax.tree.map(jnp.mean, zs.values(params))"
            )
        return self._as_jax

    def _as_jax(self) -> jax.Array:
        return jax.numpy.asarray(self.value())

    if not TYPE_CHECKING:  # to whom any attribute would be there

        def __getattr__(self, name: str) -> NoReturn:
            words = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_ARRAYS:
                words += f", its value has: write v.value().{name}"
            raise AttributeError(words, name=name, obj=self)

    @property
    def real(self) -> Any:
        """The real part of the value: ``optax.tree.norm`` takes it of its leaves."""
        return self.value().real

    @property
    def imag(self) -> Any:
        """The imaginary part of the value."""
        return self.value().imag

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.value())
        if dtype is not None and value.dtype != dtype:
            return value.astype(dtype)
        return value.copy() if copy else value

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        values = [value_of(x) for x in inputs]
        if any(isinstance(x, jax.Array) for x in values):
            return getattr(jax.numpy, ufunc.__name__)(*values)
        return ufunc(*values)

    def __getitem__(self, index: Any) -> Any:
        return self.value()[index]

    def __iter__(self) -> Any:
        return iter(self.value())

    def __len__(self) -> int:
        return len(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __float__(self) -> float:
        return float(self.value())

    def __index__(self) -> int:
        return operator.index(self.value())

    def __format__(self, how: str) -> str:
        return format(self.value(), how) if how else str(self)

    def __neg__(self) -> Any:
        return -self.value()

    def __pos__(self) -> Any:
        return +self.value()

    def __abs__(self) -> Any:
        return abs(self.value())

    def __invert__(self) -> Any:
        return ~self.value()

    def __round__(self, digits: int = 0) -> Any:
        return self.value().round(digits)

    def __add__(self, other: Any) -> Any:
        return self.value() + value_of(other)

    def __radd__(self, other: Any) -> Any:
        return value_of(other) + self.value()

    def __sub__(self, other: Any) -> Any:
        return self.value() - value_of(other)

    def __rsub__(self, other: Any) -> Any:
        return value_of(other) - self.value()

    def __mul__(self, other: Any) -> Any:
        return self.value() * value_of(other)

    def __rmul__(self, other: Any) -> Any:
        return value_of(other) * self.value()

    def __truediv__(self, other: Any) -> Any:
        return self.value() / value_of(other)

    def __rtruediv__(self, other: Any) -> Any:
        return value_of(other) / self.value()

    def __floordiv__(self, other: Any) -> Any:
        return self.value() // value_of(other)

    def __rfloordiv__(self, other: Any) -> Any:
        return value_of(other) // self.value()

    def __mod__(self, other: Any) -> Any:
        return self.value() % value_of(other)

    def __rmod__(self, other: Any) -> Any:
        return value_of(other) % self.value()

    def __divmod__(self, other: Any) -> Any:
        return divmod(self.value(), value_of(other))

    def __rdivmod__(self, other: Any) -> Any:
        return divmod(value_of(other), self.value())

    def __pow__(self, other: Any) -> Any:
        return self.value() ** value_of(other)

    def __rpow__(self, other: Any) -> Any:
        return value_of(other) ** self.value()

    def __matmul__(self, other: Any) -> Any:
        return self.value() @ value_of(other)

    def __rmatmul__(self, other: Any) -> Any:
        return value_of(other) @ self.value()

    def __and__(self, other: Any) -> Any:
        return self.value() & value_of(other)

    def __rand__(self, other: Any) -> Any:
        return value_of(other) & self.value()

    def __or__(self, other: Any) -> Any:
        return self.value() | value_of(other)

    def __ror__(self, other: Any) -> Any:
        return value_of(other) | self.value()

    def __xor__(self, other: Any) -> Any:
        return self.value() ^ value_of(other)

    def __rxor__(self, other: Any) -> Any:
        return value_of(other) ^ self.value()

    def __lshift__(self, other: Any) -> Any:
        return self.value() << value_of(other)

    def __rshift__(self, other: Any) -> Any:
        return self.value() >> value_of(other)

    def __lt__(self, other: Any) -> Any:
        return self.value() < value_of(other)

    def __le__(self, other: Any) -> Any:
        return self.value() <= value_of(other)

    def __gt__(self, other: Any) -> Any:
        return self.value() > value_of(other)

    def __ge__(self, other: Any) -> Any:
        return self.value() >= value_of(other)

    def __eq__(self, other: object) -> Any:
        return self.value() == value_of(other)

    def __ne__(self, other: object) -> Any:
        return self.value() != value_of(other)

    # Elementwise ``==`` and hashing by identity, as torch does: variables are keys of
    # dicts and members of sets, where Python looks at identity first.
    def __hash__(self) -> int:
        if (told := asked_hash.get()) is not None:
            told(self)
        return id(self)

    def __iadd__(self, other: Any) -> NoReturn:
        self._no_inplace("+=", "assign_add")

    def __isub__(self, other: Any) -> NoReturn:
        self._no_inplace("-=", "assign_sub")

    def __imul__(self, other: Any) -> NoReturn:
        self._no_inplace("*=", "assign")

    def __itruediv__(self, other: Any) -> NoReturn:
        self._no_inplace("/=", "assign")

    def __ifloordiv__(self, other: Any) -> NoReturn:
        self._no_inplace("//=", "assign")

    def __imod__(self, other: Any) -> NoReturn:
        self._no_inplace("%=", "assign")

    def __ipow__(self, other: Any) -> NoReturn:
        self._no_inplace("**=", "assign")

    def __imatmul__(self, other: Any) -> NoReturn:
        self._no_inplace("@=", "assign")

    def __iand__(self, other: Any) -> NoReturn:
        self._no_inplace("&=", "assign")

    def __ior__(self, other: Any) -> NoReturn:
        self._no_inplace("|=", "assign")

    def __ixor__(self, other: Any) -> NoReturn:
        self._no_inplace("^=", "assign")

    def __ilshift__(self, other: Any) -> NoReturn:
        self._no_inplace("<<=", "assign")

    def __irshift__(self, other: Any) -> NoReturn:
        self._no_inplace(">>=", "assign")

    def _no_inplace(self, what: str, instead: str) -> NoReturn:
        raise TypeError(
            f"{what} would replace the variable by an array and change nothing on it: "
            f"call {instead}(...) to update it, or write it out (x = v + y) for a value"
        )


def value_of(other: Any) -> Any:
    """The value of a variable; anything else as it is."""
    return other.value() if isinstance(other, ArrayOperators) else other


def _refuses(asking: CodeType) -> bool:
    """Whether a function asks for ``__jax_array__`` to refuse who has one: then it has
    a sentence about that. What it is called changes from one jax to the next."""
    name = "__jax_array__"
    words = asking.co_consts[1:]  # without the docstring
    return any(isinstance(x, str) and name in x and x != name for x in words)
