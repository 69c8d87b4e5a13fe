"""One call of ``apply_gradients``: gradients of the leaves of a tree, as they travel.

A call goes as a whole from where it is made to where it is carried out: replicas bring
their gradients together, and what an optimizer computes of several gradients is
computed of these. Only then does it become updates of variables. What an optimizer
cannot do with it is refused before anything is sent or computed, with the variables
that it is about and what to write instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from zstrat.variables._storage import KnowsSlots
from zstrat.variables._table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.optimizers import (
        Binding,
        Coupling,
        Extras,
        LeafRule,
        TreeCut,
        TreeRule,
        TreeStructure,
    )
    from zstrat.variables._spec import VariableSpec
    from zstrat.variables._storage import StorageUpdate, VariableHandle
    from zstrat.wire import UpdateOp

    from ._slots import OptimizerHandle


class VariableUpdate(NamedTuple):
    """One update of a variable or of rows of a table, as a recorder is told of it.

    ``operands``: of a whole variable an array of its shape; of rows, also of those of
    one variable, indices ``[n]`` and rows ``[n, ...]``. Shapes and dtypes were checked
    before.
    """

    target: VariableHandle | Table
    op: UpdateOp
    operands: tuple[Any, ...]
    optimizer: OptimizerHandle | None

    @property
    def variable(self) -> VariableHandle:
        """The variable, or the first component of the table."""
        return self.target.components[0]

    @property
    def subject(self) -> VariableSpec | Table:
        """What an error says is updated; made into words there alone."""
        target = self.target
        return target if isinstance(target, Table) else target.spec


class UpdateRecorder(Protocol):
    """The trace of a step function, as far as a variable writes its updates down."""

    def update(self, update: VariableUpdate) -> None:
        """Notes an update."""
        ...


class GradientTarget(Protocol):
    """A variable as a leaf of a tree, be it in parts: the variables that hold it, and
    what becomes of a gradient there."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def components(self) -> tuple[VariableHandle, ...]: ...

    @property
    def table(self) -> Table: ...

    def _planned(self, op: UpdateOp, value: Any) -> list[StorageUpdate]: ...

    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None
    ) -> list[StorageUpdate]: ...

    def _row_updates(
        self,
        op: UpdateOp,
        rows: tuple[np.ndarray, np.ndarray],
        optimizer: OptimizerHandle | None,
    ) -> list[StorageUpdate]: ...

    def _record(
        self,
        recording: UpdateRecorder,
        op: UpdateOp,
        value: Any,
        optimizer: OptimizerHandle | None,
    ) -> None: ...

    def _record_rows(
        self,
        recording: UpdateRecorder,
        op: UpdateOp,
        rows: tuple[Any, Any],
        optimizer: OptimizerHandle | None,
    ) -> None: ...


class CalledOptimizer(KnowsSlots, Protocol):
    """The optimizer of a call, for who carries the call out or asks for its state: the
    transformation on the call's tree, and a place for what is made of its traces."""

    @property
    def iterations(self) -> GradientTarget | None: ...

    @property
    def made(self) -> dict[Any, Any]: ...

    def rule(
        self, call: GradientCall, *, is_here: bool, is_traced: bool = True
    ) -> TreeRule: ...

    def leaf_rule(self, tree: TreeRule, leaf: int) -> LeafRule: ...

    def known_call(self) -> GradientCall | None:
        """A call on its tree without arrays, None if it has none yet."""
        ...


@dataclass(frozen=True, eq=False)
class GradientCall:
    """See the module's docstring.

    Args:
        targets: The variable of each leaf of the tree.
        given: The leaves that there are gradients of, by number, in order.
        sparse: Of which of these there are rows: indices ``[n]`` and rows ``[n, ...]``.
        operands: The arrays of each of them: a gradient of its shape, or indices and
            rows.
        extras, further: Further arguments of ``update``, and the arrays among them.
        is_reduced: The gradients are the same in all replicas already.
        examples: For each leaf how many gradients there are, one of each example, along
            an axis before its own; 0 for one gradient of its shape. Empty: all 0.
        where: The user's line.
    """

    optimizer: CalledOptimizer
    structure: TreeStructure
    targets: tuple[GradientTarget, ...]
    given: tuple[int, ...]
    sparse: tuple[bool, ...]
    operands: tuple[tuple[Any, ...], ...]
    extras: Extras
    further: tuple[Any, ...] = ()
    is_reduced: bool = False
    where: str = ""
    examples: tuple[int, ...] = ()

    @property
    def variables(self) -> tuple[VariableHandle, ...]:
        """The components of all variables that there are gradients of."""
        return tuple([c for leaf in self.given for c in self.targets[leaf].components])

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays in a row: those of the gradients, then further arguments."""
        return (*[x for each in self.operands for x in each], *self.further)

    def with_arrays(self, arrays: Sequence[Any]) -> GradientCall:
        """This call with other arrays, in the order of `arrays`; there may be gradients
        of more examples."""
        left = iter(arrays)
        operands = tuple([tuple([next(left) for _ in each]) for each in self.operands])
        made = replace(self, operands=operands, further=tuple(left))
        return made._counted() if any(self.examples) else made

    def _counted(self) -> GradientCall:
        counts = list(self.examples)
        for leaf, _, _, mine in self.leaves():
            if counts[leaf] and mine[0] is not None:
                counts[leaf] = mine[0].shape[0]
        return replace(self, examples=tuple(counts))

    def has_examples(self, leaf: int) -> bool:
        """Whether there are gradients of each example."""
        return bool(self.examples) and self.examples[leaf] > 0

    def leaves(self) -> Iterator[tuple[int, GradientTarget, bool, tuple[Any, ...]]]:
        """Yields for each gradient: the leaf, its variable, whether it is of rows, and
        its arrays."""
        for leaf, sparse, mine in zip(
            self.given, self.sparse, self.operands, strict=True
        ):
            yield leaf, self.targets[leaf], sparse, mine

    def rule(self, *, is_here: bool, is_traced: bool = True) -> TreeRule:
        """The transformation on this tree.

        ``is_here``: the variables live in this process, which computes with the 32 bits
        of jax unless its user has switched 64 on.
        """
        return self.optimizer.rule(self, is_here=is_here, is_traced=is_traced)

    def words(self, leaf: int) -> str:
        """What a message calls a leaf."""
        path = self.structure.words(leaf)
        name = f"variable {self.targets[leaf].name!r}"
        return f"{name} ({path})" if path else name

    def binding(self) -> Binding:
        """What parameter servers are told of the tree."""
        from zstrat.optimizers import Binding

        keys = [tuple([c.spec.key for c in v.components]) for v in self.targets]
        return Binding(self.rule(is_here=False), tuple(keys))


@runtime_checkable
class Binds(Protocol):
    """A storage that has to be told of the tree of an optimizer before it is used."""

    def bind(self, call: GradientCall) -> None:
        """Tells of the tree of a call, once.

        Raises:
            ValueError: It cannot be told, or is refused; says why.
        """
        ...


@runtime_checkable
class BindsAsync(Protocol):
    """As `Binds`, for who awaits it."""

    async def bind_async(self, call: GradientCall) -> None:
        """`Binds.bind`, without blocking the running loop."""
        ...


def encoded(call: GradientCall) -> bytes:
    """`GradientCall.binding` as it travels; made once for each tree.

    Raises:
        ValueError: It cannot be sent; says why.
    """
    binding = call.binding()
    made = call.optimizer.made.setdefault("encoded", {})
    # By identity: rules are kept by their optimizer, which keeps this, too.
    key = id(binding.rule), binding.keys
    if key not in made:
        made[key] = binding.encoded()
    found: bytes = made[key]
    return found


def seen(dtype: Any, *, is_here: bool) -> np.dtype:
    """The dtype of a leaf as the optimizer sees it."""
    found: np.dtype = np.dtype(dtype)
    if is_here:
        found = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return found


def require_whole(call: GradientCall, cut: TreeCut) -> None:
    """Refuses a call that an optimizer of a whole tree cannot carry out.

    Raises:
        ValueError: Gradients are left out, or are rows.
    """
    assert cut.coupling is not None
    if len(call.given) < len(call.targets):
        left = next(n for n in range(len(call.targets)) if n not in call.given)
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} moves the variables of "
            f"its tree together ({_coupled(call, cut.coupling)}), and there is no "
            f"gradient of {call.words(left)}: give zeros for it, or leave it out of "
            "params= and of every call"
        )
    for leaf, _, sparse, _ in call.leaves():
        if sparse:
            raise ValueError(
                f"{line_of(call)}optimizer {call.optimizer.name!r} looks at more than "
                f"one row at a time, because it moves the variables of its tree "
                f"together ({_coupled(call, cut.coupling)}), so it cannot take "
                f"IndexedSlices of {call.words(leaf)}: give it the dense gradient, "
                "slices.to_dense()"
            )


def require_by_leaf(call: GradientCall, tree: TreeRule) -> None:
    """Refuses a call that an optimizer cannot carry out variable by variable.

    Raises:
        ValueError: Gradients are left out that others depend on; or there are rows, or
            parts of a variable, and the optimizer does not treat each row by itself; or
            there are rows, and it makes one move of several updates.
    """
    cut = tree.cut()
    missing = sorted(cut.gradients_for(call.given) - {*call.given})
    if missing:
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} computes something of "
            "all gradients of its tree (a global norm, a common test), and there is "
            f"none of {call.words(missing[0])}: give zeros for it, or leave it out of "
            "params= and of every call"
        )
    from zstrat.optimizers import dependence_on_padding

    for leaf, target, sparse, _ in call.leaves():
        # Whole and dense: whatever the optimizer does to rows together is what optax
        # does.
        if not sparse and len(target.components) == 1:
            continue
        rule = call.optimizer.leaf_rule(tree, leaf)
        reason = rule.row_dependence
        if not reason and sparse and cut.operands:
            reason = dependence_on_padding(tree, leaf)
        if reason:
            raise _by_rows(call, leaf, sparse, reason)
        if sparse and rule.several_updates:
            raise _of_several_updates(call, leaf, rule.several_updates)


def require_servers(call: GradientCall, tree: TreeRule) -> None:
    """Refuses an optimizer that parameter servers cannot run, or cannot run here.

    Raises:
        ValueError: It couples variables, or as `require_by_leaf`.
    """
    cut = tree.cut()
    acts = cut.program.acts
    if acts:
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} calls back into Python "
            f"({acts}), which a parameter server does not run: take the callback out"
        )
    if cut.coupling is not None:
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} mixes variables, which "
            "live on parameter servers, each by itself: "
            f"{_coupled(call, cut.coupling)}. What is computed of gradients alone (a "
            "global norm) may stand before everything that keeps a state: "
            "optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), and "
            "gradients may be accumulated in the step; else train with a strategy "
            "whose processes hold all variables (MirroredStrategy, "
            "MultiWorkerMirroredStrategy)"
        )
    _require_own_start(call, tree)
    require_by_leaf(call, tree)


def _require_own_start(call: GradientCall, tree: TreeRule) -> None:
    """
    Raises:
        ValueError: The state of a leaf begins with something made of several.
    """
    for leaf in call.given:
        slot = call.optimizer.leaf_rule(tree, leaf).coupled_start
        if slot:
            other = call.words(next(n for n in range(len(call.targets)) if n != leaf))
            raise ValueError(
                f"{line_of(call)}optimizer {call.optimizer.name!r} begins with {slot}, "
                f"made of the values of {call.words(leaf)}, {other} and perhaps more, "
                "which live on parameter servers, each by itself: use an optimizer "
                "whose state begins with constants, or with each variable's own value, "
                "or train with a strategy whose processes hold all variables "
                "(MirroredStrategy, MultiWorkerMirroredStrategy)"
            )


def _coupled(call: GradientCall, coupling: Coupling) -> str:
    said = _what_couples(call, coupling)
    who = coupling.transformation
    return f"{said} (in {who})" if who else said


def _what_couples(call: GradientCall, coupling: Coupling) -> str:
    first = call.words(coupling.leaf)
    if coupling.state:
        between = f"its state {coupling.state}"
        if coupling.other is None:
            return f"{between} is made of {first} and others"
        return f"{between} is made of {first} and {call.words(coupling.other)}"
    if coupling.other is None:
        return f"{first} depends on something that is of no variable"
    return (
        f"the next value of {first} depends on values or on the state of "
        f"{call.words(coupling.other)}"
    )


def _by_rows(call: GradientCall, leaf: int, sparse: bool, reason: str) -> ValueError:
    what = "take IndexedSlices of" if sparse else "move the parts of"
    cure = (
        "Give it the dense gradient, slices.to_dense(), of a variable in one piece"
        if sparse
        else "Keep the variable in one piece (a partitioner that leaves it whole)"
    )
    return ValueError(
        f"{line_of(call)}optimizer {call.optimizer.name!r} looks at more than one row "
        f"at a time, so it cannot {what} {call.words(leaf)}: {reason}. {cure}, or use "
        "an optimizer that works element by element (sgd, adam, adagrad, rmsprop, "
        "lion, ...)"
    )


def _of_several_updates(call: GradientCall, leaf: int, who: str) -> ValueError:
    return ValueError(
        f"{line_of(call)}optimizer {call.optimizer.name!r} makes one move of several "
        f"updates ({who}) and cannot take IndexedSlices of {call.words(leaf)}: a row "
        "that the last of these updates does not name would lose what it was given "
        "before, or keep what was to be taken back. Give it the dense gradient, "
        "slices.to_dense(), leave that out for this variable (optax.multi_transform), "
        "or add up the losses in the step"
    )


def line_of(call: GradientCall) -> str:
    """How a message begins that knows the user's line."""
    return f"{call.where}: " if call.where else ""
