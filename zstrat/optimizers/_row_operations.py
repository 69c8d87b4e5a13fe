"""Translates updates that are elementwise in float32 to the operations of compiled
loops (`zstrat.native`).

The operations on elements become a `LoopProgram`. What is computed from scalars (a
count, a learning rate, operands of the tree) stays a program for XLA, whose results are
constants of the loops.

Law of the file: an update with an equation that has no operation is not translated.
Transcendental functions have none, as those of XLA and of the C library differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from zstrat.native import MOST_REGISTERS, MOST_TABLES, LoopProgram, RowOperation

from ._elementwise import elementwise, spreads
from ._jaxprs import ProgramPart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._leaf import LeafRule

_FLOAT: Final = np.dtype(np.float32)
_DTYPES: Final = frozenset({_FLOAT, np.dtype(np.bool_)})

_OPERATIONS: Final = {
    "abs": RowOperation.ABS,
    "add": RowOperation.ADD,
    "add_any": RowOperation.ADD,
    "and": RowOperation.AND,
    "div": RowOperation.DIV,
    "eq": RowOperation.EQ,
    "ge": RowOperation.GE,
    "gt": RowOperation.GT,
    "le": RowOperation.LE,
    "lt": RowOperation.LT,
    "max": RowOperation.MAX,
    "min": RowOperation.MIN,
    "mul": RowOperation.MUL,
    "ne": RowOperation.NE,
    "neg": RowOperation.NEG,
    "not": RowOperation.NOT,
    "or": RowOperation.OR,
    "rsqrt": RowOperation.RSQRT,
    "select_n": RowOperation.SELECT,
    "sign": RowOperation.SIGN,
    "sqrt": RowOperation.SQRT,
    "sub": RowOperation.SUB,
}
_SAME: Final = frozenset({"copy", "copy_p", "stop_gradient"})
_HIGHEST_POWER: Final = 8


@dataclass(frozen=True, eq=False)
class RowOperations:
    """An update of rows for compiled loops.

    ``scalars`` takes the slots without rows and the operands, and returns the constants
    of ``program``, ``[c]``, float32, and the new slots without rows. ``is_fixed``: it
    takes nothing and returns constants alone.
    """

    program: LoopProgram
    scalars: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, list[Any]]]
    is_fixed: bool


def row_operations(
    rule: LeafRule, shape: tuple[int, ...], dtypes: tuple[Any, ...]
) -> RowOperations | None:
    """Returns the operations of a rule; None if it is not elementwise, or has other
    dtypes or equations than compiled loops have.

    Args:
        shape: The shape of the variable, or of some of its rows.
        dtypes: The dtypes of its slots.
    """
    update = elementwise(rule, shape, dtypes)
    if update is None:
        return None
    jaxpr = update.closed.jaxpr
    slots = len(update.by_element)
    by_element = [True, *update.by_element, True]
    given, operands = jaxpr.invars[: 2 + slots], jaxpr.invars[2 + slots :]
    arrays = [v for v, element in zip(given, by_element, strict=True) if element]
    others = [v for v, element in zip(given, by_element, strict=True) if not element]
    new = list(zip(jaxpr.outvars, by_element, strict=False))
    try:
        translation = _Translation(arrays)
        for eqn in jaxpr.eqns:
            if tuple(eqn.outvars[0].aval.shape) == shape:
                translation.add(eqn)
        results = [translation.operand(v) for v, element in new if element]
    except _NoOperation:
        return None
    program = translation.program(results)
    if program is None:
        return None
    wanted = [*translation.constants, *(v for v, element in new if not element)]
    inputs = [*others, *operands]
    part = ProgramPart(update.closed, wanted, inputs)
    count = len(translation.constants)

    def scalars(
        shared: Sequence[Any], operands: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        known = dict(zip(inputs, [*shared, *operands], strict=True))
        found = part.run(known)
        constants = [jnp.asarray(each, _FLOAT) for each in found[:count]]
        return jnp.stack(constants) if count else jnp.zeros(0, _FLOAT), found[count:]

    return RowOperations(program, scalars, not inputs)


class _NoOperation(Exception):
    """Raised for an equation that compiled loops do not have."""


class _Translation:
    """The operations for the equations of a program, in order.

    Operands are variables, of arrays and of scalars, until all constants are known and
    registers can be numbered.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays
        self._operations: list[tuple[RowOperation, tuple[Any, ...]]] = []
        self._known: dict[Any, Any] = {
            var: ("given", n) for n, var in enumerate(arrays)
        }
        self._literals: dict[bytes, Any] = {}
        self.constants: list[Any] = []
        """Scalar variables and literals, in the order of their registers."""
        # Elements of tables, which have the size of a float32: no truth.
        if any(np.dtype(var.aval.dtype) != _FLOAT for var in arrays):
            raise _NoOperation

    def add(self, eqn: Any) -> None:
        """Adds an equation whose results have the shape of the variable.

        Raises:
            _NoOperation: Compiled loops do not have it.
        """
        (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
        if out is None:
            raise _NoOperation
        _require(out)
        operands = [self.operand(var) for var in eqn.invars]
        self._known[out] = self._translated(eqn, operands)

    def operand(self, var: Any) -> Any:
        """Returns what stands for a variable among operands."""
        if isinstance(var, Literal):
            _require(var)
            key = np.asarray(var.val, _FLOAT).tobytes()
            var = self._literals.setdefault(key, var)
        elif var in self._known:
            return self._known[var]
        else:
            _require(var)
        known = {id(each): n for n, each in enumerate(self.constants)}
        if id(var) not in known:
            self.constants.append(var)
        return "constant", known.get(id(var), len(known))

    def program(self, results: Sequence[Any]) -> LoopProgram | None:
        """Returns the program; None if it has too many registers or tables."""
        given = len(self._arrays)
        first = given + len(self.constants)
        starts = {"given": 0, "constant": given, "made": first}

        def register(operand: tuple[str, int]) -> int:
            kind, number = operand
            return starts[kind] + number

        if given - 1 > MOST_TABLES or first + len(self._operations) > MOST_REGISTERS:
            return None
        code = np.zeros((len(self._operations), 5), np.int32)
        for place, (operation, operands) in enumerate(self._operations):
            code[place, :2] = operation, first + place
            code[place, 2 : 2 + len(operands)] = [*map(register, operands)]
        return LoopProgram(code, np.array([*map(register, results)], np.int32))

    def _translated(self, eqn: Any, operands: Sequence[Any]) -> Any:
        name = eqn.primitive.name
        match name:
            case _ if spreads(eqn) or name in _SAME:
                return operands[0]
            # To float32: truth is 1 or 0 already.
            case "convert_element_type" if eqn.params["new_dtype"] == _FLOAT:
                return operands[0]
            case "square":
                return self._made(RowOperation.MUL, operands[0], operands[0])
            case "integer_pow" if 0 < eqn.params["y"] <= _HIGHEST_POWER:
                return self._power(operands[0], eqn.params["y"])
            case "clamp":
                low, value, high = operands
                raised = self._made(RowOperation.MAX, value, low)
                return self._made(RowOperation.MIN, raised, high)
            case "select_n" if len(operands) == 3:
                return self._made(RowOperation.SELECT, *operands)
            case _ if name in _OPERATIONS and len(operands) < 3:
                return self._made(_OPERATIONS[name], *operands)
        raise _NoOperation

    def _power(self, base: Any, exponent: int) -> Any:
        # The products that jax makes of it.
        result = None
        while True:
            if exponent & 1:
                result = base if result is None else self._product(result, base)
            exponent >>= 1
            if not exponent:
                return result
            base = self._product(base, base)

    def _product(self, one: Any, other: Any) -> Any:
        return self._made(RowOperation.MUL, one, other)

    def _made(self, operation: RowOperation, *operands: Any) -> Any:
        self._operations.append((operation, operands))
        return "made", len(self._operations) - 1


def _require(var: Any) -> None:
    if np.dtype(var.aval.dtype) not in _DTYPES:
        raise _NoOperation
