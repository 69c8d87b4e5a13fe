"""The values in a trace: where they come from, and which values depend on which.

One pass over the equations of a program (`zstrat.jaxprs`) finds the inputs that each
variable depends on.

`Discovery` makes a placeholder for each value. If every placeholder was made at the
level of the body itself, the trace is the program: `body_program` turns placeholders
into inputs. So the body of a step runs once, and its prints appear once. If a
placeholder was made inside of an equation (a body that jax traces by itself), there is
no such program, and the body is traced again, with a `Replay` of the program's inputs.

Law: the equations that `body_program` drops compute only placeholders, and only from
the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, no_effects

from zstrat.jaxprs import bits_of, entered, mask_of, mask_of_all, masks, union_of

from . import _refusals

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from jax.extend.core import JaxprEqn, Var

    from zstrat.variables import SlotRule, Table, VariableHandle, VariableSpec

    from ._iterator import Element, StepIterator


def marked(indices: jax.Array) -> jax.Array:
    """Marks indices of rows that the program itself uses, so that they can be found in
    the trace; they are not among its outputs."""
    named: jax.Array = checkpoint_name(indices, _MARK)  # type: ignore[no-untyped-call]
    return named


_MARK: Final = "zstrat rows"


_Move = Callable[[np.ndarray], np.ndarray]


class InputView(NamedTuple):
    """Elements of the input ``number`` of a program, chosen without a computation; all
    of them in their order if there are no ``moves``."""

    number: int
    moves: tuple[_Move, ...]

    def elements(self, given: Any) -> np.ndarray:
        """Returns the elements ``[n]`` of the view, of a value of the input."""
        array = np.asarray(given)
        for move in self.moves:
            array = move(array)
        return array.reshape(-1)


class Flow:
    """Which inputs the values of one traced program depend on."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self._closed = closed
        self._jaxpr: Any = closed.jaxpr
        self._masks = masks(self._jaxpr, _inputs(self._jaxpr))
        self._maker: dict[Var, JaxprEqn] = {
            var: eqn for eqn in self._jaxpr.eqns for var in eqn.outvars
        }

    @property
    def outputs(self) -> int:
        """Number of outputs of the program."""
        return len(self._jaxpr.outvars)

    @property
    def has_effects(self) -> bool:
        """Whether the program has side effects: prints, or callbacks to Python."""
        return bool(self._jaxpr.effects)

    def inputs_of(self, outputs: Sequence[int]) -> int:
        """Returns, as bits, the inputs on which at least one of these outputs
        depends."""
        variables = [self._jaxpr.outvars[number] for number in outputs]
        return mask_of_all(self._masks, variables)

    def origin(self, output: int) -> tuple[Any, ...]:
        """Returns the variables of the jaxpr whose elements make up an output of
        integers.

        Looks through reshapes and concatenations, which keep the order of elements.
        Outputs of equal origins have equal elements in equal order.
        """
        return tuple(self._origins(self._jaxpr.outvars[output]))

    def input_at_origin(self, output: int) -> int | None:
        """Returns the number of the input that the output is, possibly reshaped; None
        if it is not an input."""
        view = self.view_of_input(output)
        return None if view is None or view.moves else view.number

    def view_of_input(self, output: int) -> InputView | None:
        """Returns the view of an input that an output of integers is; None if it has to
        be computed.

        Looks through reshapes, transpositions and slices of fixed bounds.
        """
        var, moves = self._jaxpr.outvars[output], list[_Move]()
        while not isinstance(var, Literal) and var in self._maker:
            eqn = self._maker[var]
            move = _move(eqn)
            if move is None:
                return None
            # The elements are returned as a vector: their last shape does not matter.
            if moves or not _moves_nothing(eqn):
                moves.append(move)
            var = eqn.invars[0]
        numbers = [n for n, given in enumerate(self._jaxpr.invars) if given is var]
        return InputView(numbers[0], tuple(moves[::-1])) if numbers else None

    def has_marked(self, name: str) -> bool:
        """Returns whether a value is marked with this name."""
        return any(
            eqn.primitive.name == "name" and eqn.params["name"] == name
            for eqn in self._jaxpr.eqns
        )

    def inputs_of_marked(self, name: str) -> int:
        """Returns, as bits, the inputs on which values depend that jax's
        ``checkpoint_name`` has marked with this name."""
        return _marked(self._jaxpr, name)

    def kind_of(self, output: int) -> Any:
        """Returns shape and dtype of an output."""
        return self._jaxpr.outvars[output].aval

    def part(
        self,
        outputs: Sequence[int],
        *,
        with_effects: bool = False,
        evaluate: Callable[[ClosedJaxpr, list[int]], Callable[..., Any]] | None = None,
    ) -> tuple[Callable[..., list[jax.Array]], list[int]]:
        """Extracts the part of the program that computes these outputs; returns it as a
        function, with the numbers of its inputs.

        Args:
            with_effects: Include equations with side effects.
            evaluate: Makes the function that evaluates the part; it gets the part, and
                the numbers that the part's inputs have in the whole program.
        """
        wanted = [self._jaxpr.outvars[number] for number in outputs]
        needed = {var for var in wanted if not isinstance(var, Literal)}
        kept: list[JaxprEqn] = []
        # Backwards, so an equation is met after all that use its results.
        for eqn in reversed(self._jaxpr.eqns):
            acts = with_effects and bool(eqn.effects)
            if acts or any(var in needed for var in eqn.outvars):
                kept.append(eqn)
                needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
        invars = [var for var in self._jaxpr.invars if var in needed]
        # The part declares the effects of its own equations alone.
        effects = set(no_effects).union(*[eqn.effects for eqn in kept])
        pruned = self._jaxpr.replace(
            invars=invars, outvars=wanted, eqns=kept[::-1], effects=effects
        )
        closed = ClosedJaxpr(pruned, self._closed.consts)
        acts = with_effects and bool(self._jaxpr.effects)
        used = -1 if acts else self.inputs_of(outputs)
        numbers = {var: n for n, var in enumerate(self._jaxpr.invars)}
        run: Callable[..., Any] = jaxpr_as_fun(closed)
        if evaluate is not None:
            run = evaluate(closed, [numbers[var] for var in invars])
        inputs = [numbers[var] for var in invars if used >> numbers[var] & 1]

        def part(*given: Any) -> list[jax.Array]:
            known = dict(zip(inputs, given, strict=True))
            filled = [
                known[number]
                if (number := numbers[var]) in known
                else jnp.zeros(var.aval.shape, var.aval.dtype)
                for var in invars
            ]
            return list(run(*filled))

        if len(inputs) == len(invars):
            return part, inputs
        # The other inputs go into an inner jit, for other results. These must not be
        # computed, as a loop over placeholders may never end; XLA removes them.
        return jax.jit(part), inputs

    def _origins(self, var: Any) -> Iterator[Any]:
        eqn = None if isinstance(var, Literal) else self._maker.get(var)
        if eqn is None:
            yield var
        # Along another axis, or in more dimensions, elements of the operands would
        # alternate.
        elif eqn.primitive.name == "concatenate" and len(var.aval.shape) == 1:
            for operand in eqn.invars:
                yield from self._origins(operand)
        elif _moves_nothing(eqn):
            yield from self._origins(eqn.invars[0])
        else:
            yield var


def _moves_nothing(eqn: Any) -> bool:
    """Returns whether an equation returns the elements of its operand in the same
    order."""
    match eqn.primitive.name:
        case "reshape":
            # With dimensions it transposes first: ravel(order="F") does that.
            return eqn.params.get("dimensions") is None
        case "copy" | "copy_p" | "squeeze" | "stop_gradient":
            return True
        case "convert_element_type":
            before = eqn.invars[0].aval.dtype
            after = eqn.outvars[0].aval.dtype
            # Into a wider dtype; values may wrap in a smaller one. Random keys have
            # dtypes that are not numpy's.
            is_integer = isinstance(before, np.dtype) and before.kind in "iu"
            return is_integer and np.can_cast(before, after, "safe")
    return False


def _move(eqn: Any) -> _Move | None:
    """Returns how numpy makes the result of an equation from its operand; None if it
    does more than choose and order elements."""
    params = eqn.params
    match eqn.primitive.name:
        case "slice":
            starts, ends = params["start_indices"], params["limit_indices"]
            strides = params["strides"] or (1,) * len(starts)
            return itemgetter(tuple(map(slice, starts, ends, strides)))
        case "transpose":
            return methodcaller("transpose", params["permutation"])
    if _moves_nothing(eqn):
        return methodcaller("reshape", eqn.outvars[0].aval.shape)
    return None


def _marked(jaxpr: Any, name: str) -> int:
    by_variable = masks(jaxpr, _inputs(jaxpr))
    inputs = 0
    for eqn in jaxpr.eqns:
        given = [mask_of(by_variable, var) for var in eqn.invars]
        if (inner := entered(eqn)) is not None:
            within = _marked(inner, name)
            inputs |= union_of(given[number] for number in bits_of(within))
        elif eqn.primitive.name == "name" and eqn.params["name"] == name:
            inputs |= given[0]
    return inputs


def _inputs(jaxpr: Any) -> list[int]:
    """Returns the set of each input of a program: the input itself, as a bit."""
    return [1 << number for number in range(len(jaxpr.invars))]


SlotsKey = tuple[int, int]
"""The key of a variable, and the id of the optimizer whose slots are meant."""


class TraceFeed(Protocol):
    """Supplies the values that a trace needs."""

    def value(self, spec: VariableSpec) -> jax.Array:
        """Returns the value of a variable before the step's own writes."""
        ...

    def element(self, ordinal: int, iterator: StepIterator) -> Any:
        """Returns the next element of the step's iterator number ``ordinal``."""
        ...

    def rows(self, number: int, table: Table, shape: Sequence[int]) -> jax.Array:
        """Returns the rows of lookup ``number``, whose ids have this shape."""
        ...

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        """Returns the slots that an optimizer has for a variable of this process before
        the step."""
        ...


@dataclass(frozen=True, slots=True)
class Placeholder:
    """An abstract value in a trace; placeholders of equal names are the same value."""

    name: Hashable
    value: jax.Array


class Discovery:
    """Supplies a trace with placeholders, because the values that it needs are not
    known yet.

    ``seed`` is a traced scalar. Values computed from it are traced at every depth of
    transformation, as constants would not be. ``supply`` draws elements; a region draws
    none.
    """

    def __init__(
        self,
        seed: jax.Array,
        supply: Callable[[int, StepIterator], Element] | None = None,
    ) -> None:
        self._seed = seed
        self._supply = supply
        self._elements = 0
        self.placeholders: list[Placeholder] = []
        """All placeholders, in the order in which they were made."""

    def value(self, spec: VariableSpec) -> jax.Array:
        return self._abstract(("value", spec.key), spec.shape, spec.numpy_dtype)

    def element(self, ordinal: int, iterator: StepIterator) -> Any:
        assert self._supply is not None, iterator.name
        element = self._supply(ordinal, iterator)
        _refusals.refuse_random_keys(element.leaves, iterator.name)
        drawn, self._elements = self._elements, self._elements + 1
        leaves = [
            self._abstract(("element", drawn, n), x.shape, x.dtype)
            for n, x in enumerate(element.leaves)
        ]
        return element.treedef.unflatten(leaves)

    def rows(self, number: int, table: Table, shape: Sequence[int]) -> jax.Array:
        name = "rows", number
        return self._abstract(name, (*shape, *table.shape[1:]), table.dtype)

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        key = variable.spec.key, rule.id
        return [
            self._abstract(("slot", *key, n), kind.shape, kind.dtype)
            for n, kind in enumerate(rule.kinds)
        ]

    def _abstract(self, name: Hashable, shape: Sequence[int], dtype: Any) -> jax.Array:
        seen = jax.dtypes.canonicalize_dtype(dtype)
        array = jax.lax.broadcast(
            jax.lax.convert_element_type(self._seed, seen), tuple(shape)
        )
        # An equation of its own, even of a scalar of the seed's dtype.
        value: jax.Array = checkpoint_name(array, "zstrat made up")  # type: ignore[no-untyped-call]
        self.placeholders.append(Placeholder(name, value))
        return value


class Replay:
    """Supplies the second trace of a body with the inputs of the program."""

    def __init__(
        self,
        step: str,
        values: dict[int, jax.Array],
        elements: Sequence[Any],
        rows: Sequence[jax.Array] = (),
        slots: Mapping[SlotsKey, list[Any]] | None = None,
    ) -> None:
        self._step = step
        self._values = values
        self._elements = iter(elements)
        self._rows = rows
        self._slots = {} if slots is None else slots

    def value(self, spec: VariableSpec) -> jax.Array:
        if spec.key not in self._values:
            raise _refusals.changed(self._step, f"it reads {spec}")
        return self._values[spec.key]

    def element(self, ordinal: int, iterator: StepIterator) -> Any:
        try:
            return next(self._elements)
        except StopIteration:
            what = f"it draws one more element of {iterator.name}"
            raise _refusals.changed(self._step, what) from None

    def rows(self, number: int, table: Table, shape: Sequence[int]) -> jax.Array:
        wanted = (*shape, *table.shape[1:])
        if number >= len(self._rows) or self._rows[number].shape != wanted:
            raise _refusals.changed(self._step, f"it looks up other rows of {table}")
        return self._rows[number]

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        key = variable.spec.key, rule.id
        if key not in self._slots:
            what = f"{rule.optimizer!r} updates {variable.spec}"
            raise _refusals.changed(self._step, what)
        return self._slots[key]


@dataclass(frozen=True, slots=True)
class BodyProgram:
    """A body as a program of its inputs and of values that are identified by names.

    Args:
        closed: The program, from the inputs and the values of ``names`` to the flat
            outputs.
        tree: The treedef of the outputs.
    """

    closed: ClosedJaxpr
    names: tuple[Hashable, ...]
    tree: Any

    def kind_of(self, name: Hashable) -> Any:
        """Returns shape and dtype of the value of this name; None if the program does
        not use it."""
        if name not in self.names:
            return None
        # Values come after the inputs.
        return self.closed.in_avals[self.names.index(name) - len(self.names)]

    def __call__(self, inputs: Sequence[Any], values: Mapping[Hashable, Any]) -> Any:
        """Computes the outputs of the body. Called in a trace of jax."""
        given = [values[name] for name in self.names]
        return self.tree.unflatten(jaxpr_as_fun(self.closed)(*inputs, *given))


def body_program(
    closed: ClosedJaxpr, placeholders: Sequence[Placeholder], tree: Any
) -> BodyProgram | None:
    """Turns placeholders into inputs; returns None if a placeholder was made inside of
    an equation.

    Args:
        closed: The program, from a seed and the inputs to the outputs, then the
            placeholders.
        tree: The treedef of the outputs.
    """
    jaxpr: Any = closed.jaxpr
    count = len(jaxpr.outvars) - len(placeholders)
    wanted, holders = jaxpr.outvars[:count], jaxpr.outvars[count:]
    makers = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    if any(isinstance(var, Literal) or var not in makers for var in holders):
        return None
    given = set(holders)
    left = [eqn for eqn in jaxpr.eqns if given.isdisjoint(eqn.outvars)]
    eqns = _without(jaxpr.invars[0], left, wanted)
    if eqns is None or len(given) < len(holders):
        return None
    effects = set(no_effects).union(*[eqn.effects for eqn in eqns])
    cut = jaxpr.replace(
        invars=[*jaxpr.invars[1:], *holders], outvars=wanted, eqns=eqns, effects=effects
    )
    names = tuple([placeholder.name for placeholder in placeholders])
    return BodyProgram(ClosedJaxpr(cut, closed.consts), names, tree)


def _without(seed: Any, eqns: list[Any], wanted: Sequence[Any]) -> list[Any] | None:
    """Returns the equations that do not depend on the seed; None if one that does is
    needed, or has an effect."""
    tainted = {seed}
    for eqn in eqns:
        if any(not isinstance(x, Literal) and x in tainted for x in eqn.invars):
            tainted.update(eqn.outvars)
    needed = {x for x in wanted if not isinstance(x, Literal)}
    kept: list[Any] = []
    # Backwards, as whether an equation is needed is known after those that use it.
    for eqn in reversed(eqns):
        is_tainted = not tainted.isdisjoint(eqn.outvars)
        if is_tainted and (eqn.effects or not needed.isdisjoint(eqn.outvars)):
            return None
        if not is_tainted:
            kept.append(eqn)
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    return None if seed in needed else kept[::-1]
