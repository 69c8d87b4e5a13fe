"""The update of one leaf of the tree of an optimizer, in any number of rows.

A process may hold any number of rows of a leaf: a part of a partitioned variable, or
the rows for which a step has gradients. Then the whole tree is traced again with so
many rows, and the update of the leaf is taken from that trace; `_rows` checks whether
the result is the same.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from zstrat.jaxprs import mask_of

from ._jaxprs import ProgramPart, constant, form_of
from ._rows import FREE, ROWS, RowsTogether, axes_of_rows, same_but_for
from ._transformation import shaped
from ._tree import GENERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._cut import TreeCut
    from ._state import StateLeaf
    from ._transformation import Shape, Sizes
    from ._tree import TreeRule

T = TypeVar("T")

_OF_SEVERAL_UPDATES: Final = {
    "MultiStepsState": "optax.MultiSteps",
    "ApplyEvery": "optax.apply_every",
    "SAMState": "optax.contrib.sam",
    "LookaheadState": "optax.lookahead",
    "AccumulateAvgUpdatesState": "average_incrementally_updates",
    "PerElementMeanAndSumSqDiffGradsState": "an average of several gradients",
}
"""The states of optax transformations that combine several updates into one change of
the variables: class name to the function of optax. By name, because not every version
of optax has the experimental ones."""


@dataclass(frozen=True)
class Slot:
    """One array of the state that is stored with a leaf. ``name`` is its path in the
    state, without the path of the leaf: ``[0].mu``. ``rows``: whether its first axis is
    that of the leaf. ``state`` is its number in the state of the tree."""

    name: str
    rows: bool
    state: int


class LeafRule:
    """The update of one leaf of a tree: its slots, and its program for any number of
    rows.

    ``leaf`` is the number of the leaf. All attributes but ``slots`` and ``init`` need a
    tree that can be updated leaf by leaf (`TreeRule.cut`).
    """

    def __init__(self, tree: TreeRule, leaf: int) -> None:
        self.tree, self.leaf = tree, leaf
        self.kind: Shape = tree.kinds[leaf]
        self.gradient: Any = tree.gradients[leaf]
        self._steps: dict[Any, _Step] = {}
        self._closed: dict[Any, Any] = {}

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The arrays of the state that are stored with the leaf, in the order of `init`
        and `step`."""
        numbers = self.tree.cut().slots[self.leaf].all
        about = self.tree.state()
        names = _distinct([self._name(n) for n in numbers])
        grown = self._grown()
        return tuple(
            Slot(name, self._has_rows(about[n].kind.shape, grown, n), n)
            for name, n in zip(names, numbers, strict=True)
        )

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the slots, in order."""
        return tuple([slot.name for slot in self.slots])

    @functools.cached_property
    def has_rows(self) -> tuple[bool, ...]:
        """For each slot, whether its first axis is that of the leaf."""
        return tuple([slot.rows for slot in self.slots])

    def kinds(self, size: int | None = None) -> list[Shape]:
        """Returns the shapes and dtypes of the initial slots for a leaf with ``size``
        rows."""
        about = self.tree.state(self._sizes(size))
        return [about[slot.state].kind for slot in self.slots]

    def steady_kinds(self, size: int | None = None) -> list[Shape]:
        """Returns the shapes and dtypes of slots for a leaf with ``size`` rows, in the
        dtypes that updates do not change."""
        kinds = self.kinds(size)
        known = self.tree.settled()
        if known is None:
            return kinds
        pairs = zip(kinds, self.slots, strict=True)
        return [shaped(kind.shape, known[slot.state]) for kind, slot in pairs]

    @functools.cached_property
    def begins_together(self) -> bool:
        """Whether the initial slots depend on the values of other leaves, too."""
        return bool(self._together)

    @functools.cached_property
    def coupled_start(self) -> str:
        """The name of the slot whose initial value depends on several leaves, and that
        an update reads; "" if there is none."""
        # A measurement may begin with anything: no update looks at it.
        read = self.tree.read_state()
        return next((s.name for s in self._together if s.state in read), "")

    @functools.cached_property
    def _together(self) -> tuple[Slot, ...]:
        program = self.tree.init()
        return tuple(
            slot
            for slot in self.slots
            if mask_of(program.mask, program.outputs[slot.state]) & ~(1 << self.leaf)
        )

    def init(self, value: Any) -> list[Any]:
        """Makes the initial slots for a value. A slot whose initial value depends on
        several leaves, and that no update reads (a measurement), is zero.

        Raises:
            ValueError: There is a `coupled_start`.
        """
        if self.coupled_start:
            raise ValueError(
                f"optimizer {self.tree.name!r} begins with {self.coupled_start}, which "
                "it makes of several variables"
            )
        size = value.shape[0] if value.shape else None
        source, part = self._begun(size)
        computed = iter(part.run({source: value}))
        return [
            jnp.zeros(kind.shape, kind.dtype)
            if slot in self._together
            else next(computed)
            for slot, kind in zip(self.slots, self.kinds(size), strict=True)
        ]

    def _begun(self, size: int | None) -> tuple[Any, ProgramPart]:
        """Returns the variable that is the value of this leaf, and the part of the
        program that computes the slots that depend on this leaf alone."""
        program = self.tree.init(self._sizes(size))
        source = program.inputs[1][self.leaf]
        alone = [slot for slot in self.slots if slot not in self._together]
        wanted = [program.outputs[slot.state] for slot in alone]
        return source, ProgramPart(program.closed, wanted, [source], program.makers)

    def step(
        self, value: Any, slots: Sequence[Any], gradient: Any, operands: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Returns the new value and new slots after one update.

        Args:
            gradient: Has the value's shape.
            operands: The operands of the tree that the update of this leaf takes, see
                `TreeCut.uses`.
        """
        size = value.shape[0] if value.shape else None
        leaf_step = self._step(size, tuple([np.dtype(x.dtype) for x in slots]))
        return leaf_step.run(value, slots, gradient, operands)

    def program(self, size: int | None, dtypes: tuple[Any, ...] | None = None) -> Any:
        """Returns `step` as a jaxpr, which takes value, slots, gradient and
        operands."""
        kinds = self.kinds(size)
        dtypes = tuple([np.dtype(x.dtype) for x in kinds]) if dtypes is None else dtypes
        if (size, dtypes) not in self._closed:
            self._closed[size, dtypes] = self._step(size, dtypes).closed()
        return self._closed[size, dtypes]

    @functools.cached_property
    def uses(self) -> tuple[int, ...]:
        """The numbers of the operands of the tree that the update of this leaf
        takes."""
        return self.tree.cut().uses[self.leaf]

    @functools.cached_property
    def row_dependence(self) -> str:
        """Why the rows of the leaf cannot be updated one by one; "" if they can be."""
        return self._of_all_alike("rows", lambda: _dependence_on_rows(self))

    @functools.cached_property
    def several_updates(self) -> str:
        """The transformation that combines several updates into one change; "" if the
        optimizer has no such transformation. It excludes updates of single rows: a
        row that occurs in only some of these updates would get only a part of the
        change."""
        state = self.tree.state_of()
        numbered = state.treedef.unflatten(range(len(state.leaves)))
        numbers = {slot.state for slot in self.slots if slot.rows}
        # A state of optax is a node of the tree; the search stops at it, to see all of
        # its leaves.
        nodes = jax.tree.leaves(numbered, is_leaf=lambda node: bool(_maker_of(node)))
        for node in nodes:
            if (who := _maker_of(node)) and numbers & {*jax.tree.leaves(node)}:
                return who
        return ""

    @functools.cached_property
    def digest(self) -> bytes:
        """A digest that is equal for leaves with the same update rule: of any number of
        rows if they are updated row by row. Valid in this process only."""
        return self._of_all_alike("digest", self._digest)

    def _digest(self) -> bytes:
        # Traced in one size for all: leaves of other sizes are moved alike, row by row.
        size = None if self.row_dependence else ROWS
        closed = self.program(size)
        # The text of a program names variables in order, so equal programs have equal
        # texts.
        digest = hashlib.blake2b(str(closed).encode(), digest_size=16)
        for const in closed.consts:
            digest.update(constant(const).tobytes())
        names = [(slot.name, slot.rows) for slot in self.slots]
        digest.update(repr((size, names, str(self.initial(size)))).encode())
        return digest.digest()

    def _of_all_alike(self, what: str, find: Callable[[], T]) -> T:
        """Caches ``find()`` under ``what`` for all leaves that are updated alike
        (`_likeness`): a tree has hundreds of them, and tracing each would take long."""
        return self.tree.remembered((what, self._likeness), find)

    @functools.cached_property
    def _likeness(self) -> Any:
        """A key that is equal for leaves of one tree if equal programs make their
        updates and their initial slots, in their own size and in another one."""
        read, together = self.tree.read_state(), self._together
        slots = [(s.name, s.rows, s.state in read, s in together) for s in self.slots]
        form: list[Any] = [self.kind, self.gradient, self.uses, tuple(slots)]
        # In two sizes: leaves that are alike in one may differ where the number of rows
        # matters.
        sizes = [None, _another_size(self)] if self.kind.shape else [None]
        try:
            for size in sizes:
                source, part = self._begun(size)
                begun = part.closed([source])
                if begun is None:
                    return self.leaf
                form += self.kinds(size)
                form += [form_of(self.program(size)), form_of(begun)]
        except Exception:  # it cannot be traced in that size, as is said where it is
            return self.leaf
        return tuple(form)

    def initial(self, size: int | None) -> Any:
        """Returns `init` as a jaxpr, for ``size`` rows."""
        kind = self.tree.values_at(self._sizes(size))[self.leaf]
        with self.tree.precision():
            return jax.make_jaxpr(self.init)(kind)

    def _sizes(self, size: int | None) -> Sizes | None:
        # The tree as it is, whose traces are there already.
        if size is None or size == self.kind.shape[0]:
            return None
        return self.tree.sizes(size)

    def _step(self, size: int | None, dtypes: tuple[Any, ...]) -> _Step:
        key = (size, dtypes)
        if key not in self._steps:
            sizes = self._sizes(size)
            cut = self.tree.cut(sizes, self._state_dtypes(dtypes))
            self._steps[key] = _Step(self, cut)
        return self._steps[key]

    def _state_dtypes(self, dtypes: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Returns dtypes for the whole state of the tree, in which the slots of this
        leaf have ``dtypes``."""
        # A state may change its dtypes with the first updates: this tries each of them.
        for generation in range(GENERATIONS):
            known = self.tree.steady(generation)
            if known is None:
                known = tuple([x.kind.dtype for x in self.tree.state()])
            if all(
                np.dtype(known[slot.state]) == dtype
                for slot, dtype in zip(self.slots, dtypes, strict=True)
            ):
                return self.tree.steady(generation)
        # Slots that were restored, say, in dtypes that no update gives.
        of_state = [x.kind.dtype for x in self.tree.state()]
        for slot, dtype in zip(self.slots, dtypes, strict=True):
            of_state[slot.state] = dtype
        return tuple(of_state)

    def _name(self, state: int) -> str:
        """Returns the path of a leaf of the state, without the path of the leaf of the
        tree."""
        leaf, name = self.tree.place(state)
        about = self.tree.state()[state]
        # State of another leaf keeps its whole path, so that names stay distinct.
        return name if leaf in (None, self.leaf) else keystr(about.path)

    def _grown(self) -> Sequence[StateLeaf] | None:
        """Returns the state of a tree whose leaves have one row more; None if the leaf
        is a scalar, or the optimizer fails on that tree."""
        if not self.kind.shape:
            return None
        try:
            return self.tree.state(self.tree.sizes(self.kind.shape[0] + 1))
        except Exception:  # the optimizer looks at shapes: then nothing goes by rows
            return None

    def _has_rows(
        self, shape: tuple[int, ...], grown: Sequence[StateLeaf] | None, state: int
    ) -> bool:
        if grown is None or state >= len(grown):
            return False
        rows = self.kind.shape[0]
        # Not by its shape alone: a slot of another leaf, or of nobody, may have as many
        # rows.
        more = tuple(grown[state].kind.shape)
        return shape[:1] == (rows,) and more == (rows + 1, *shape[1:])


def _maker_of(node: Any) -> str:
    kind = type(node)
    is_optax = kind.__module__.partition(".")[0] == "optax"
    return _OF_SEVERAL_UPDATES.get(kind.__name__, "") if is_optax else ""


def leaf_rule(tree: TreeRule, leaf: int) -> LeafRule:
    """Returns the update rule of one leaf of a tree; cached."""
    return tree.remembered(("leaf", leaf), lambda: LeafRule(tree, leaf))


def cut_for_rows(tree: TreeRule) -> TreeRule:
    """Returns a rule for the same tree, traced and cut into updates of leaves. If some
    leaf can be updated row by row only with ``early`` operands (scalars that depend on
    one gradient alone), the rule has these.

    The result depends on the tree, not on the gradients of a call, so that all
    processes which apply gradients to the tree decide alike. It is cached, because each
    call outside of steps needs it.
    """
    return tree.remembered(("for rows",), lambda: _cut_for_rows(tree))


def _cut_for_rows(tree: TreeRule) -> TreeRule:
    result = tree.traced()
    # Cut early already; or updated as a whole, where no row is moved by itself.
    if result.early or result.cut().coupling is not None:
        return result
    early = result.early_rule()
    for leaf in range(len(result.kinds)):
        # The same operands make the same program for this leaf.
        if _operands(early, leaf) == _operands(result, leaf):
            continue
        was = leaf_rule(result, leaf).row_dependence
        if was and not leaf_rule(early, leaf).row_dependence:
            return early
    return result


def _operands(tree: TreeRule, leaf: int) -> set[Any]:
    cut = tree.cut()
    return {cut.operands[number] for number in cut.uses[leaf]}


class _Step:
    """The part of one program that updates one leaf."""

    def __init__(self, rule: LeafRule, cut: TreeCut) -> None:
        leaf, program = rule.leaf, cut.program
        assert cut.coupling is None, "a leaf of a coupled tree has no program"
        self._rule = rule
        gradients, values, states, _ = program.inputs
        operands = [cut.operands[n] for n in cut.uses[leaf]]
        slot_inputs = [states[slot.state] for slot in rule.slots]
        self._inputs = [values[leaf], *slot_inputs, gradients[leaf], *operands]
        leaves = program.counts[0]
        after = [program.outputs[leaves + slot.state] for slot in rule.slots]
        wanted = [program.outputs[leaf], *after]
        self._part = ProgramPart(program.closed, wanted, self._inputs, program.makers)
        assert not self._part.missing, f"leaf {leaf} lacks {self._part.missing}"

    def run(
        self, value: Any, slots: Sequence[Any], gradient: Any, operands: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        given = [value, *slots, gradient, *operands]
        known = dict(zip(self._inputs, given, strict=True))
        moved, *after = self._part.run(known)
        return moved, after

    def closed(self) -> Any:
        result = self._part.closed(self._inputs)
        if result is not None:
            return result

        def run(*given: Any) -> list[Any]:
            known = dict(zip(self._inputs, given, strict=True))
            return self._part.run(known)

        with self._rule.tree.precision():
            return jax.make_jaxpr(run)(*[var.aval for var in self._inputs])


def _another_size(rule: LeafRule) -> int:
    return ROWS if rule.kind.shape[0] != ROWS else ROWS + 2


def _dependence_on_rows(rule: LeafRule) -> str:
    """Returns why the rows of a leaf cannot be updated one by one; "" if they can."""
    if not rule.kind.shape:
        return "it has no rows"
    rows, other = rule.kind.shape[0], _another_size(rule)
    try:
        here, there = rule.program(None), rule.program(other)
        kinds, before = rule.kinds(other), rule.kinds(None)
        start, begun = rule.initial(None), rule.initial(other)
    except Exception as error:  # what was said is the reason
        return f"it looks at the number of rows ({type(error).__name__}: {error})"
    for slot, one, two in zip(rule.slots, before, kinds, strict=True):
        if not slot.rows and one.shape != two.shape:
            return f"it keeps {slot.name}, whose shape depends on the number of rows"
    # After the value, the slots and the gradient come the operands.
    operands = len(rule.slots) + 2
    pairs = zip(here.in_avals[operands:], there.in_avals[operands:], strict=False)
    for one, two in pairs:
        if one.shape != two.shape:
            return "it takes something that has a row for each of its rows"
    if not same_but_for(here, there, rows, other) or not same_but_for(
        start, begun, rows, other
    ):
        return "it computes with the number of rows, or decides by it"
    try:
        _require_rows_apart(rule, there, other)
        _require_begun_apart(rule, begun, other)
    except RowsTogether as found:
        return str(found)
    return ""


def _require_rows_apart(rule: LeafRule, closed: Any, rows: int) -> None:
    # The value and the gradient have rows; operands are the same for all rows.
    slots = [0 if slot.rows else FREE for slot in rule.slots]
    operands = len(closed.jaxpr.invars) - len(slots) - 2
    given = [0, *slots, 0, *[FREE] * operands]
    axes = axes_of_rows(closed.jaxpr, given, rows)
    for number, axis in enumerate(axes):
        if number and not rule.slots[number - 1].rows and axis != FREE:
            name = rule.slots[number - 1].name
            raise RowsTogether(f"it makes {name} of several rows")
        if (not number or rule.slots[number - 1].rows) and axis not in (0, FREE):
            raise RowsTogether("it turns rows into something else")


def _require_begun_apart(rule: LeafRule, closed: Any, rows: int) -> None:
    # A leaf that is not read is a measurement, which is made again each time.
    read = rule.tree.read_state()
    slots = [slot for slot in rule.slots if slot.state in read]
    outputs = dict(zip(rule.slots, closed.jaxpr.outvars, strict=True))
    inputs = closed.jaxpr.invars
    wanted = [outputs[slot] for slot in slots]
    part = ProgramPart(closed, wanted, inputs).closed(inputs)
    jaxpr = closed.jaxpr.replace(outvars=wanted) if part is None else part.jaxpr
    for slot, axis in zip(slots, axes_of_rows(jaxpr, [0], rows), strict=True):
        if axis not in ((0, FREE) if slot.rows else (FREE,)):
            raise RowsTogether(f"it begins with {slot.name}, made of several rows")


def _distinct(names: Sequence[str]) -> list[str]:
    """Appends numbers to names that occur several times."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen[name] = seen.get(name, -1) + 1
        result.append(f"{name}#{count}" if count else name)
    return result
