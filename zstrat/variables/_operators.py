"""Operators: variables in expressions of Python, numpy and jax.

Law: an operator reads the variable once and leaves the rest to numpy (on the
coordinator) or jax (inside a step). In-place operators raise: ``v += 1`` would rebind
the name to an array. Conversions by functions of optax that make an optimizer or a
schedule also raise: these would keep the present number, and a later ``assign`` would
have no effect.
"""

from __future__ import annotations

import abc
import inspect
import operator
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import jax
import numpy as np

from ._recorder import VariableUse, note_use, recorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType


_Operator: TypeAlias = "Callable[[ArrayOperators, Any], Any]"
_BETWEEN: Final = frozenset({"zstrat", "jax", "numpy"})
"""Packages whose frames are skipped in the search for the function that converts a
variable."""
_WITHIN: Final = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
"""Names of frames (comprehensions and the like) that belong to the function around
them."""
_OF_ARRAYS: Final = frozenset(name for name in dir(jax.Array) if name[0] != "_")


def _left(operate: Callable[[Any, Any], Any]) -> _Operator:
    """Makes an operator method with the variable on the left."""

    def left(self: ArrayOperators, other: Any) -> Any:
        return operate(self._implied(), value_of(other))

    return left


def _right(operate: Callable[[Any, Any], Any]) -> _Operator:
    """Makes an operator method with the variable on the right."""

    def right(self: ArrayOperators, other: Any) -> Any:
        return operate(value_of(other), self._implied())

    return right


def _refused(what: str, instead: str = "assign") -> Callable[..., NoReturn]:
    """Makes a method for an in-place operator that raises an error."""

    def refuse(self: ArrayOperators, other: Any) -> NoReturn:
        raise TypeError(
            f"{what} would rebind the name to an array and not update the variable: "
            f"call {instead}(...) to update it, or write x = v + y for a value"
        )

    return refuse


HYPERPARAMETERS: Final = (
    "make the optimizer with optax.inject_hyperparams(optax.sgd)(learning_rate=0.1) "
    "(or any other in place of sgd), and assign "
    'optimizer.hyperparams["learning_rate"] = 0.01 between steps, in place of a '
    "variable. For a number that stays as it is, write variable.numpy()"
)
"""The remedy, for errors, if a program changes a hyperparameter."""


class ArrayWanted(ValueError):
    """Raised when a variable is passed to a jax function that takes only arrays.

    Not a TypeError, which jax would replace by its own.
    """

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(message)
        self.variable = variable


class ArrayOperators(abc.ABC):
    """Python's operators for objects that have an array as their value."""

    __slots__ = ()

    # Higher than jax.Array's 100: numpy must leave ``ndarray * variable`` to us.
    __array_priority__ = 200

    @abc.abstractmethod
    def value(self) -> Any:
        """Returns the array that the operators act on."""

    @property
    def __jax_array__(self) -> Callable[[], jax.Array]:
        """Returns the value to jax functions that convert their arguments, such as
        ``jnp.asarray``.

        Raises:
            ValueError: Outside of steps, if the function takes only arrays (jax's own
                error would not say what to do).
        """
        # jax asks here, too, before it refuses an argument of a compiled function. In a
        # step another place replaces its error by one that names the step.
        if recorder.get() is None and _refuses(sys._getframe(1).f_code):
            raise ArrayWanted(
                str(self),
                f"{self!r:.100} is passed to a function that jax compiles (jnp.exp, "
                "jnp.mean, jax.nn.relu, jax.jit, jax.grad, ...), which takes arrays: "
                "write v.value(), or zs.values(tree) for a pytree, "
                "jax.tree.map(jnp.mean, zs.values(params))",
            )
        return self._as_jax

    def _implied(self) -> Any:
        """Reads the value for an implicit conversion, such as to an array.

        Raises:
            ValueError: The converting function makes an optimizer or a schedule, which
                would keep the present value.
        """
        value = self.value()  # first: it refuses to be read while jax traces
        # Frame 0 is this one, 1 the operator, 2 the code that uses it.
        if recorder.get() is None and (maker := _maker_of(sys._getframe(2))):
            raise ValueError(
                f"optax.{maker} would keep the value that {self!r:.100} has now, "
                "and a later assign would change nothing: " + HYPERPARAMETERS
            )
        return value

    def _as_jax(self) -> jax.Array:
        return jax.numpy.asarray(self._implied())

    if not TYPE_CHECKING:  # mypy would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            words = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_ARRAYS:
                words += f", its value has: write v.value().{name}"
            raise AttributeError(words, name=name, obj=self)

    @property
    def real(self) -> Any:
        """The real part of the value, as ``optax.tree.norm`` reads it from leaves."""
        return self.value().real

    @property
    def imag(self) -> Any:
        """The imaginary part of the value."""
        return self.value().imag

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self._implied())
        # As numpy's protocol has it: another dtype is a copy by itself.
        if dtype is not None and value.dtype != dtype:
            return value.astype(dtype)
        return value.copy() if copy else value

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Any:
        # Reductions, ``out=`` and ``where=`` take arrays, not what has a value.
        if method != "__call__" or options:
            raise TypeError(
                f"{self!r:.100} is passed to a function of numpy (np.sum, np.max, "
                f"np.add(..., out=), ...) that calls np.{ufunc.__name__}.{method} and "
                "takes arrays: write v.value(), in a step with jnp in place of np, or "
                "zs.values(tree) for a pytree"
            )
        values = [
            x._implied() if isinstance(x, ArrayOperators) else value_of(x)
            for x in inputs
        ]
        # In a step the values are traced, and only jax computes with them.
        if any(isinstance(x, jax.Array) for x in values):
            return getattr(jax.numpy, ufunc.__name__)(*values)
        return ufunc(*values)

    def __getitem__(self, index: Any) -> Any:
        return self._implied()[index]

    def __iter__(self) -> Any:
        return iter(self._implied())

    def __len__(self) -> int:
        return len(self._implied())

    def __bool__(self) -> bool:
        return bool(self._implied())

    def __int__(self) -> int:
        return int(self._implied())

    def __float__(self) -> float:
        return float(self._implied())

    def __index__(self) -> int:
        return operator.index(self._implied())

    def __format__(self, how: str) -> str:
        return format(self.value(), how) if how else str(self)

    def __neg__(self) -> Any:
        return -self._implied()

    def __pos__(self) -> Any:
        return +self._implied()

    def __abs__(self) -> Any:
        return abs(self._implied())

    def __invert__(self) -> Any:
        return ~self._implied()

    def __round__(self, digits: int = 0) -> Any:
        return self._implied().round(digits)

    __add__, __radd__ = _left(operator.add), _right(operator.add)
    __sub__, __rsub__ = _left(operator.sub), _right(operator.sub)
    __mul__, __rmul__ = _left(operator.mul), _right(operator.mul)
    __truediv__, __rtruediv__ = _left(operator.truediv), _right(operator.truediv)
    __floordiv__, __rfloordiv__ = _left(operator.floordiv), _right(operator.floordiv)
    __mod__, __rmod__ = _left(operator.mod), _right(operator.mod)
    __divmod__, __rdivmod__ = _left(divmod), _right(divmod)
    __pow__, __rpow__ = _left(operator.pow), _right(operator.pow)
    __matmul__, __rmatmul__ = _left(operator.matmul), _right(operator.matmul)
    __and__, __rand__ = _left(operator.and_), _right(operator.and_)
    __or__, __ror__ = _left(operator.or_), _right(operator.or_)
    __xor__, __rxor__ = _left(operator.xor), _right(operator.xor)
    __lshift__ = _left(operator.lshift)
    __rshift__ = _left(operator.rshift)
    __lt__ = _left(operator.lt)
    __le__ = _left(operator.le)
    __gt__ = _left(operator.gt)
    __ge__ = _left(operator.ge)
    __eq__ = _left(operator.eq)
    __ne__ = _left(operator.ne)

    # Elementwise ``==`` and hashing by identity, as torch does: variables can be keys
    # of dicts and members of sets, where Python compares identity first.
    def __hash__(self) -> int:
        note_use(VariableUse.HASH, self)
        return id(self)

    __iadd__ = _refused("+=", "assign_add")
    __isub__ = _refused("-=", "assign_sub")
    __imul__ = _refused("*=")
    __itruediv__ = _refused("/=")
    __ifloordiv__ = _refused("//=")
    __imod__ = _refused("%=")
    __ipow__ = _refused("**=")
    __imatmul__ = _refused("@=")
    __iand__ = _refused("&=")
    __ior__ = _refused("|=")
    __ixor__ = _refused("^=")
    __ilshift__ = _refused("<<=")
    __irshift__ = _refused(">>=")


def value_of(other: Any) -> Any:
    """Returns the value of a variable; returns anything else unchanged."""
    return other.value() if isinstance(other, ArrayOperators) else other


def _refuses(asking: CodeType) -> bool:
    """Returns whether a function reads ``__jax_array__`` of an object only to refuse
    it."""
    # It then has an error message about it among its constants. Its own name changes
    # between versions of jax.
    name = "__jax_array__"
    constants = asking.co_consts[1:]  # without the docstring
    return any(isinstance(x, str) and name in x and x != name for x in constants)


def _maker_of(frame: FrameType | None) -> str:
    """Returns the name of the optax function that converts the variable, if this
    function makes an optimizer or a schedule; otherwise ""."""
    package = ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _BETWEEN and frame.f_code.co_name not in _WITHIN:
            break
        frame = frame.f_back
    if frame is None or package != "optax":
        return ""
    name = frame.f_code.co_name
    # `len` stands for a name that the module lacks: it has no `__code__`.
    function: Any = inspect.unwrap(frame.f_globals.get(name, len))
    if getattr(function, "__code__", None) is not frame.f_code:
        return ""  # a nested function, such as the update of an optimizer
    # optax annotates what its functions return: transformations and schedules.
    returned = str(function.__annotations__.get("return"))
    return (
        name if "GradientTransformation" in returned or "Callable" in returned else ""
    )
