"""`GradientCall`: one call of ``apply_gradients``; and `TraceRecorder`.

A call is one object until it is applied: replicas combine their gradients, then the
optimizer computes operands that depend on several gradients, and only then is the call
split into updates of variables. The ``require_...`` functions refuse calls that the
optimizer cannot apply, before anything is sent or computed.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from zstrat.variables._table import Table
from zstrat.wire import MergeRule

from ._slots import OptimizerHandle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zstrat.optimizers import (
        Binding,
        Coupling,
        Extras,
        LeafRule,
        TreeCut,
        TreeRule,
        TreeStructure,
    )
    from zstrat.variables._storage import StorageUpdate, VariableHandle, VariableSpec
    from zstrat.wire import UpdateOp

    from ._rounds import Rounds


class VariableUpdate(NamedTuple):
    """One update of a variable, or of rows of a table, that a recorder records.

    ``operands`` are an array of the variable's shape, or indices ``[n]`` and rows ``[n,
    ...]``. Their shapes and dtypes have been checked.
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
        """The target of the update as errors name it: the table, or the spec of the
        variable."""
        target = self.target
        return target if isinstance(target, Table) else target.spec


class TraceRecorder:
    """Base of recorders: record reads and updates of variables while the body of a step
    function runs.

    The body runs while jax traces it (a capture), or with actual values (an eager
    step).
    """

    # No ABC: `isinstance` is asked at each read, and ABCMeta answers it slowly.

    live = False
    """Whether the body computes with actual values instead of being captured."""
    has_values = False
    """Whether values that the body reads can be converted to numpy."""
    may_create = False
    """Whether the body of the step may create variables."""

    @abc.abstractmethod
    def read(self, variable: VariableHandle) -> jax.Array:
        """Returns the value of a variable at this point of the step: earlier writes of
        the same step are included."""

    @abc.abstractmethod
    def update(self, update: VariableUpdate) -> None:
        """Records an update of a variable or of rows of a table."""

    @abc.abstractmethod
    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        """Returns rows of a table, ``ids.shape + row``; ``ids`` are integers."""

    @abc.abstractmethod
    def optimize(self, call: GradientCall) -> None:
        """Records the gradients of one ``apply_gradients`` as one unit."""

    @abc.abstractmethod
    def drew(self, leaf: object) -> bool:
        """Returns whether this very object is an element, or a leaf of one, that the
        step drew from an iterator. Such arrays are split over the replicas of a
        worker."""

    @abc.abstractmethod
    def draw(self, iterator: Any) -> Any:
        """Returns the next element of a `StepIterator`, traced if the step is
        captured."""

    @abc.abstractmethod
    def require_known_end(self, name: str) -> None:
        """Checks that it is known whether the dataset of this name has ended. Called
        before Python branches on that.

        Raises:
            LoopsOverData: The step is being traced, so this is not known.
        """

    def take_values(self, values: Mapping[int, Any]) -> None:
        """Sets the values of other processes' variables, by key, for the whole step."""
        raise AssertionError(f"{self}: only captured steps take values")

    def copies(self, variable: VariableHandle) -> jax.Array:
        """Returns the copies that all replicas have of a variable, ``[count, ...]``."""
        raise AssertionError(f"{self}: a replica knows only its own copy")

    def put_copies(self, variable: VariableHandle, copies: jax.Array) -> None:
        """Replaces the copies that all replicas have of a variable."""
        raise AssertionError(f"{self}: a replica knows only its own copy")


class GradientTarget(Protocol):
    """A leaf of a tree of variables, sharded or not, with the methods that make its
    updates by gradients."""

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
        recording: TraceRecorder,
        op: UpdateOp,
        value: Any,
        optimizer: OptimizerHandle | None,
    ) -> None: ...

    def _record_rows(
        self,
        recording: TraceRecorder,
        op: UpdateOp,
        rows: tuple[Any, Any],
        optimizer: OptimizerHandle | None,
    ) -> None: ...


class CalledOptimizer(OptimizerHandle, Protocol):
    """The optimizer of a `GradientCall`: its transformation on trees, and a cache
    (``made``)."""

    @property
    def iterations(self) -> GradientTarget | None: ...

    @property
    def made(self) -> dict[Any, Any]: ...

    def rule(
        self, call: GradientCall, *, is_here: bool, is_traced: bool = True
    ) -> TreeRule: ...

    def leaf_rule(self, tree: TreeRule, leaf: int) -> LeafRule: ...

    def known_call(self) -> GradientCall | None:
        """Returns a call without arrays on the optimizer's tree of variables; None if
        the tree is not known."""
        ...


@dataclass(frozen=True, eq=False)
class GradientCall:
    """The gradients of one ``apply_gradients``; see the module's docstring.

    Args:
        targets: The variable of each leaf of the tree.
        given: The numbers of the leaves that have gradients, in order.
        sparse: For each of these gradients, whether it consists of rows
            (`IndexedSlices`).
        operands: The arrays of each gradient: one of the variable's shape, or indices
            ``[n]`` and rows ``[n, ...]``.
        extras, further: Further arguments of ``update``, and the arrays among them.
        is_reduced: Whether the gradients are already the same in all replicas.
        examples: For each leaf the number of examples whose gradients are stacked along
            an axis before its own; 0 for a leaf with one gradient. Empty if all are 0.
        where: The user's line that called ``apply_gradients``, for errors.
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
        """The components of all variables that have gradients."""
        return tuple([c for leaf in self.given for c in self.targets[leaf].components])

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays in one tuple: first those of the gradients, then the further
        arguments."""
        return (*[x for each in self.operands for x in each], *self.further)

    def with_arrays(self, arrays: Sequence[Any]) -> GradientCall:
        """Returns the call with other arrays, in the order of `arrays`; the number of
        examples may differ."""
        left = iter(arrays)
        operands = tuple(
            [tuple([next(left) for _ in group]) for group in self.operands]
        )
        call = replace(self, operands=operands, further=tuple(left))
        return call._counted() if any(self.examples) else call

    def _counted(self) -> GradientCall:
        counts = list(self.examples)
        for leaf, _, _, arrays in self.leaves():
            # None: a call that is kept without its arrays.
            if counts[leaf] and arrays[0] is not None:
                counts[leaf] = arrays[0].shape[0]
        return replace(self, examples=tuple(counts))

    def has_examples(self, leaf: int) -> bool:
        """Returns whether the leaf has a stack of gradients, one for each example."""
        return bool(self.examples) and self.examples[leaf] > 0

    def leaves(self) -> Iterator[tuple[int, GradientTarget, bool, tuple[Any, ...]]]:
        """Iterates over the gradients: number of the leaf, variable, whether the
        gradient consists of rows, arrays."""
        for leaf, sparse, arrays in zip(
            self.given, self.sparse, self.operands, strict=True
        ):
            yield leaf, self.targets[leaf], sparse, arrays

    def rule(self, *, is_here: bool, is_traced: bool = True) -> TreeRule:
        """Returns the optimizer's transformation on the tree of this call.

        ``is_here``: the variables are stored in this process, which computes with 32
        bits unless ``jax_enable_x64`` is on.
        """
        return self.optimizer.rule(self, is_here=is_here, is_traced=is_traced)

    def words(self, leaf: int) -> str:
        """Returns the name of a leaf for messages: its variable and its path in the
        tree."""
        path = self.structure.words(leaf)
        name = f"variable {self.targets[leaf].name!r}"
        return f"{name} ({path})" if path else name

    def binding(self) -> Binding:
        """Makes the description of the optimizer on this tree that parameter servers
        receive."""
        # Here, because it imports optax, which a program that only coordinates need not
        # load.
        from zstrat.optimizers import Binding

        keys = [tuple([c.spec.key for c in v.components]) for v in self.targets]
        return Binding(self.rule(is_here=False), tuple(keys))


@runtime_checkable
class Binds(Protocol):
    """A storage to which the optimizer's tree of variables must be sent before
    gradients."""

    def bind(self, call: GradientCall) -> None:
        """Sends the tree of variables of a call to the servers, once for each tree.

        Raises:
            ValueError: The tree cannot be sent, or a server refuses it; the error says
                why.
        """
        ...


@runtime_checkable
class BindsAsync(Protocol):
    """The awaitable form of `Binds`."""

    async def bind_async(self, call: GradientCall) -> None:
        """Sends the tree of a call like `Binds.bind`, without blocking the running
        loop."""
        ...


def encoded(call: GradientCall) -> bytes:
    """Encodes `GradientCall.binding` for servers; the result is cached for each tree.

    Raises:
        ValueError: The description cannot be encoded; the error says why.
    """
    binding = call.binding()
    cache = call.optimizer.made.setdefault("encoded", {})
    # By identity: rules are kept by their optimizer, which keeps this, too.
    key = id(binding.rule), binding.keys
    if key not in cache:
        cache[key] = binding.encoded()
    data: bytes = cache[key]
    return data


def seen(dtype: Any, *, is_here: bool) -> np.dtype:
    """Returns the dtype of a leaf as the optimizer computes with it: with 32 bits if
    the variable is in this process (``is_here``), unless ``jax_enable_x64`` is on."""
    kept: np.dtype = np.dtype(dtype)
    # jax cuts to 32 bits in this process; servers keep what the program declared.
    if is_here:
        kept = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return kept


def require_whole(call: GradientCall, cut: TreeCut) -> None:
    """Refuses a call that an optimizer which updates its variables together cannot
    apply.

    Raises:
        ValueError: A gradient is missing, or consists of rows.
    """
    # A coupling is what makes it an optimizer of a whole tree.
    assert cut.coupling is not None
    if len(call.given) < len(call.targets):
        left = next(n for n in range(len(call.targets)) if n not in call.given)
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} updates the variables "
            f"of its tree together ({_coupled(call, cut.coupling)}), and got no "
            f"gradient of {call.words(left)}: give zeros for it, or leave it out of "
            "params= and of every call"
        )
    for leaf, _, sparse, _ in call.leaves():
        if sparse:
            cure = (
                "give the table its own optimizer"
                if call.targets[leaf].table.is_hashed
                else "give it the dense gradient, slices.to_dense()"
            )
            raise ValueError(
                f"{line_of(call)}optimizer {call.optimizer.name!r} looks at more than "
                f"one row at a time, because it updates the variables of its tree "
                f"together ({_coupled(call, cut.coupling)}), so it cannot take "
                f"IndexedSlices of {call.words(leaf)}: {cure}"
            )


def require_by_leaf(call: GradientCall, tree: TreeRule) -> None:
    """Refuses a call that an optimizer cannot apply variable by variable.

    Raises:
        ValueError: A gradient is missing on which other updates depend; or a gradient
            consists of rows, or a variable is sharded, and the optimizer does not treat
            each row separately; or a gradient consists of rows, and the optimizer
            accumulates several updates.
    """
    cut = tree.cut()
    # A norm over only the given gradients would be another number than the user means.
    missing = sorted(cut.gradients_for(call.given) - {*call.given})
    if missing:
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} computes something from "
            "all gradients of its tree (a global norm, a common test), and got no "
            f"gradient of {call.words(missing[0])}: give zeros for it, or leave it out "
            "of params= and of every call"
        )
    from zstrat.optimizers import dependence_on_padding

    for leaf, target, sparse, _ in call.leaves():
        # Not sharded, and dense: the optimizer sees what optax would see.
        if not sparse and len(target.components) == 1:
            continue
        # Sharded, or rows: the optimizer sees one part at a time, and must not notice.
        rule = call.optimizer.leaf_rule(tree, leaf)
        reason = rule.row_dependence
        # A part has padding in steps, so that shapes stay few; an operand like a norm
        # must not see it.
        if not reason and sparse and cut.operands:
            reason = dependence_on_padding(tree, leaf)
        if reason:
            raise _by_rows(call, leaf, sparse, reason)
        if sparse and rule.several_updates:
            raise _of_several_updates(call, leaf, rule.several_updates)


def require_servers(call: GradientCall, tree: TreeRule) -> None:
    """Refuses a call that parameter servers cannot apply.

    Raises:
        ValueError: The optimizer calls Python, its update of a variable depends on
            other variables, or as `require_by_leaf`.
    """
    cut = tree.cut()
    acts = cut.program.acts
    # A callback runs in the process that has the function.
    if acts:
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} calls back into Python "
            f"({acts}), which parameter servers do not run: remove the callback"
        )
    if cut.coupling is not None:
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} mixes variables, but "
            "parameter servers update each variable by itself: "
            f"{_coupled(call, cut.coupling)}. Values that depend only on gradients (a "
            "global norm) can be computed before transformations with a state: "
            "optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)); and the "
            "step can accumulate gradients. Otherwise train with a strategy whose "
            "processes hold all variables (MirroredStrategy, "
            "MultiWorkerMirroredStrategy)"
        )
    _require_own_start(call, tree)
    require_by_leaf(call, tree)


def _require_own_start(call: GradientCall, tree: TreeRule) -> None:
    """Refuses an optimizer whose initial state for a variable depends on other
    variables.

    Raises:
        ValueError: The initial state for a variable depends on other variables.
    """
    # A server knows nothing but its own variables when it makes the initial state.
    for leaf in call.given:
        slot = call.optimizer.leaf_rule(tree, leaf).coupled_start
        if slot:
            other = call.words(next(n for n in range(len(call.targets)) if n != leaf))
            raise ValueError(
                f"{line_of(call)}optimizer {call.optimizer.name!r} computes its "
                f"initial state {slot} from the values of {call.words(leaf)}, {other} "
                "and perhaps more, but parameter servers update each variable by "
                "itself: use an optimizer whose initial state is constant, or depends "
                "on each variable's own value, or train with a strategy whose "
                "processes hold all variables (MirroredStrategy, "
                "MultiWorkerMirroredStrategy)"
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
            return f"{between} depends on {first} and others"
        return f"{between} depends on {first} and {call.words(coupling.other)}"
    if coupling.other is None:
        return f"{first} depends on something that belongs to no variable"
    return (
        f"the next value of {first} depends on values or on the state of "
        f"{call.words(coupling.other)}"
    )


def _by_rows(call: GradientCall, leaf: int, sparse: bool, reason: str) -> ValueError:
    what = "take IndexedSlices of" if sparse else "update the parts of"
    if call.targets[leaf].table.is_hashed:
        cure = "Give the table its own optimizer"
    elif sparse:
        cure = (
            "Give it the dense gradient, slices.to_dense(), of a variable that is not "
            "sharded"
        )
    else:
        cure = "Do not shard the variable (use a partitioner that leaves it whole)"
    return ValueError(
        f"{line_of(call)}optimizer {call.optimizer.name!r} looks at more than one row "
        f"at a time, so it cannot {what} {call.words(leaf)}: {reason}. {cure}, or use "
        "an optimizer that works element by element (sgd, adam, adagrad, rmsprop, "
        "lion, ...)"
    )


def _of_several_updates(call: GradientCall, leaf: int, who: str) -> ValueError:
    is_hashed = call.targets[leaf].table.is_hashed
    dense = "Give it the dense gradient, slices.to_dense(), exclude"
    cure = "Exclude" if is_hashed else dense
    return ValueError(
        f"{line_of(call)}optimizer {call.optimizer.name!r} accumulates several updates "
        f"({who}) and cannot take IndexedSlices of {call.words(leaf)}: a row that is "
        f"not in the last of these updates would lose the others. {cure} this "
        "variable from the accumulation (optax.multi_transform), or add up the losses "
        "in the step"
    )


def line_of(call: GradientCall) -> str:
    """Returns the user's line of code as the beginning of a message, or ""."""
    return f"{call.where}: " if call.where else ""


def require_mergeable(call: GradientCall, rounds: Rounds, *, in_step: bool) -> None:
    """Refuses gradients that cannot be contributed to a round of merged gradients
    (`Rounds`).

    Raises:
        ValueError: The call is not in a step, or its gradients cannot be merged.
    """
    who = f"{line_of(call)}optimizer {call.optimizer.name!r} has rounds, "
    if not in_step:
        raise ValueError(
            f"{who}which collect the gradients of steps: call apply_gradients in "
            "a zs.function without eager=True that the coordinator schedules"
        )
    # A contribution is one array per variable; further arguments are not part of it.
    if call.extras.kinds or call.extras.static:
        raise ValueError(
            f"{who}and its update takes further arguments, which are not merged: "
            "leave them out, or leave out rounds="
        )
    # RDA scales each contribution by its norm, and a server has only its part of a
    # sharded gradient.
    if rounds.rule is MergeRule.RDA:
        for leaf, target, sparse, _ in call.leaves():
            if len(target.components) > 1 and not sparse:
                raise ValueError(
                    f"{who}and merge='rda' needs the norm of a whole gradient, but "
                    f"{call.words(leaf)} is sharded: use merge='mean', or leave "
                    "the variable whole"
                )
