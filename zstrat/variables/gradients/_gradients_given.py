"""Checks the gradients and transformations that users give to optimizers.

A `GradientCall` is made from the arguments of ``apply_gradients``. These are two
pytrees of the same structure, or TF's pairs; gradients that are None are skipped. If
the optimizer has a tree (``params=``), each variable is found as a leaf of that tree,
whatever its position in the arguments.

Errors that a user's transformation raises are converted to ValueErrors. The
transformation is traced once to a program that runs for each update, so a variable that
it reads (a learning rate) would become a constant of that program.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.variables import _convert
from zstrat.variables._abstract import WORDS, AbstractVariable
from zstrat.variables._operators import HYPERPARAMETERS, ArrayWanted
from zstrat.variables._recorder import StagedAccess, recorder, refuse_update
from zstrat.variables._storage import LOCAL
from zstrat.variables._table import IndexedSlices
from zstrat.wire import UpdateOp

from ._gradient_call import GradientCall, line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.optimizers import Extras, TreeRule, TreeStructure

    from ._gradient_call import CalledOptimizer

    Tree = tuple[TreeStructure, tuple[AbstractVariable, ...]]


def traced(call: GradientCall, rule: TreeRule, *, is_traced: bool) -> TreeRule:
    """Traces ``rule``, the transformation on the tree of a call; returns it.

    Args:
        is_traced: Whether to trace the update too, not only the initial state.

    Raises:
        ValueError: The transformation cannot be traced; the message quotes its error.
    """
    # Here and below, as it loads optax, which programs without optimizers do not need.
    from zstrat.optimizers import cut_for_rows

    with _tracing(call):
        if is_traced:
            return cut_for_rows(rule)
        rule.state()
        return rule


@contextmanager
def _tracing(call: GradientCall) -> Iterator[None]:
    """Converts errors in the block to ValueErrors that name the optimizer and its
    tree."""
    # Hidden from the step that is being traced: its values belong to that trace, and
    # the program that is made here is kept.
    token = recorder.set(None)
    try:
        yield
    except (StagedAccess, ArrayWanted) as error:
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} reads {error.variable} "
            "while it is traced, and would keep that value for all updates: "
            f"{HYPERPARAMETERS}. Pass anything else that changes between updates to "
            "apply_gradients, as a further argument of the transformation's update"
        ) from error
    except Exception as error:  # of the transformation; to the caller
        # An error of ours (`TreeStructure`), which says what to do.
        if isinstance(error, ValueError) and "asks for the path" in str(error):
            raise
        said = str(error).rstrip(".")
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} cannot be applied to "
            f"its tree, {call.structure.treedef}: {type(error).__name__}: {said}. "
            "Labels, masks and functions of paths have to fit the tree that the "
            "optimizer sees: that of zs.Optimizer(..., params=params), or else that of "
            "apply_gradients(grads, params). Give further arguments of its update "
            "(value=loss) to apply_gradients; what wants functions (obj_fn=) or "
            "gradients of single examples (optax.contrib.dpsgd) runs under strategies "
            "whose processes hold all variables (MirroredStrategy, "
            "MultiWorkerMirroredStrategy), not on parameter servers"
        ) from error
    finally:
        recorder.reset(token)


@dataclass(frozen=True)
class GivenGradients:
    """A tree of variables with their gradients, which are stored by the number of the
    leaf."""

    structure: TreeStructure
    targets: tuple[AbstractVariable, ...]
    gradients: dict[int, Any]

    @property
    def moved(self) -> list[AbstractVariable]:
        """The variables that have a gradient."""
        return [self.targets[leaf] for leaf in sorted(self.gradients)]

    def call(
        self, optimizer: CalledOptimizer, extra: dict[str, Any], *, is_reduced: bool
    ) -> GradientCall:
        """Makes the `GradientCall`. Converts gradients to traced arrays in steps,
        otherwise to numpy arrays.

        Raises:
            ValueError: The shape or dtype of a gradient does not fit its variable.
        """
        leaves = tuple(sorted(self.gradients))
        pairs = [(self.gradients[leaf], self.targets[leaf]) for leaf in leaves]
        extras, further = extras_of(extra)
        sparse = [isinstance(gradient, IndexedSlices) for gradient, _ in pairs]
        # One gradient per example; IndexedSlices are never stacked.
        stacked = [
            not is_sparse and _is_of_examples(*pair)
            for is_sparse, pair in zip(sparse, pairs, strict=True)
        ]
        arrays = [
            (_of_examples(*pair),) if is_stacked else _arrays(*pair)
            for is_stacked, pair in zip(stacked, pairs, strict=True)
        ]
        # By leaf of the whole tree, of which only some may have gradients.
        counts = [0] * len(self.targets)
        for leaf, is_stacked, own in zip(leaves, stacked, arrays, strict=True):
            counts[leaf] = own[0].shape[0] if is_stacked else 0
        return GradientCall(
            optimizer,
            self.structure,
            self.targets,
            leaves,
            tuple(sparse),
            tuple(arrays),
            extras,
            further,
            is_reduced,
            examples=tuple(counts) if any(stacked) else (),
        )


def given_pairs(pairs: Any, tree: Tree | None) -> GivenGradients:
    """Checks an iterable of ``(gradient, variable)``.

    Raises:
        ValueError: ``pairs`` is not such an iterable or has no gradient; or a variable
            occurs twice, or is not in the tree.
    """
    present = _present(_listed(pairs))
    # With `params=` leaves have a fixed place, so pairs may come in any order.
    if tree is not None:
        return _in_tree(present, tree)
    from zstrat.optimizers import TreeStructure

    variables = tuple([variable for _, variable in present])
    structure = TreeStructure.of_pairs([variable.name for variable in variables])
    gradients = {n: gradient for n, (gradient, _) in enumerate(present)}
    return GivenGradients(structure, variables, gradients)


def given_tree(grads: Any, variables: Any, tree: Tree | None) -> GivenGradients:
    """Checks a pytree of gradients and a pytree of variables of the same structure.

    Raises:
        ValueError: Their structures differ, there is no gradient, or a variable occurs
            twice or is not in the tree.
    """
    listed, treedef = _matched(grads, variables)
    present = _present(listed)
    if tree is not None:
        return _in_tree(present, tree)
    from zstrat.optimizers import TreeStructure

    # None is not a leaf: variables without a gradient are not in the tree.
    left = treedef.unflatten([v if g is not None else None for g, v in listed])
    targets, rest = jax.tree.flatten(left)
    gradients = {n: gradient for n, (gradient, _) in enumerate(present)}
    return GivenGradients(TreeStructure(rest), tuple(targets), gradients)


def _in_tree(pairs: list[tuple[Any, AbstractVariable]], tree: Tree) -> GivenGradients:
    structure, targets = tree
    # By key: there may be several handles of one variable.
    places = {_key(variable): n for n, variable in enumerate(targets)}
    gradients: dict[int, Any] = {}
    for gradient, variable in pairs:
        leaf = places.get(_key(variable))
        if leaf is None:
            raise ValueError(
                f"variable {variable.name!r} is not in the tree of the optimizer "
                "(params=): give zs.Optimizer the whole tree that it updates, or make "
                "another optimizer for this variable"
            )
        gradients[leaf] = gradient
    return GivenGradients(structure, targets, gradients)


def _key(variable: AbstractVariable) -> tuple[int, ...]:
    return tuple([component.spec.key for component in variable.components])


def _present(
    pairs: list[tuple[Any, Any]],
) -> list[tuple[Any, AbstractVariable]]:
    # None in both is a part that a model does not have (no bias).
    pairs = [(g, v) for g, v in pairs if g is not None or v is not None]
    for _, variable in pairs:
        if not isinstance(variable, AbstractVariable):
            raise ValueError(
                f"apply_gradients updates zs.Variable objects, got "
                f"{type(variable).__name__}{_order([g for g, _ in pairs])}"
            )
        variable.require_optimizable()
    present = [(g, v) for g, v in pairs if g is not None]
    if not present:
        names = [v.name for _, v in pairs]
        raise ValueError(f"No gradients provided for any variable: {names}")
    # Only those with gradients: a variable that is skipped may be there twice.
    _require_distinct([v for _, v in present])
    return present


def _order(gradients: Any) -> str:
    """Returns a hint about the order of arguments if ``gradients`` contain
    variables."""
    if not any(map(_is_variable, jax.tree.leaves(gradients, is_leaf=_is_variable))):
        return ""
    return (
        ". Gradients come first: apply_gradients(grads, variables), or pairs "
        "(gradient, variable)"
    )


def _require_distinct(variables: list[AbstractVariable]) -> None:
    seen = set()
    for part in (part for variable in variables for part in variable.components):
        key = part.spec.key
        if key in seen:
            raise ValueError(
                f"{part.spec} occurs twice in one apply_gradients, which would be two "
                "steps of the optimizer: give each variable once. Add up the gradients "
                "with respect to several arguments that contain it; "
                "zs.value_and_grad(variables=...) gives the whole gradient each time"
            )
        seen.add(key)


def _listed(pairs: Any) -> list[tuple[Any, Any]]:
    if not isinstance(pairs, Iterable):
        raise ValueError(
            "apply_gradients takes (grads, variables) or an iterable of "
            f"(gradient, variable) pairs, got {type(pairs).__name__}"
        )
    listed = list(pairs)
    if any(not isinstance(p, tuple | list) or len(p) != 2 for p in listed):
        raise ValueError(
            "apply_gradients(pairs) takes an iterable of (gradient, variable) pairs; "
            "for a pytree of gradients give the variables too: "
            "apply_gradients(grads, variables)"
        )
    return [(gradient, variable) for gradient, variable in listed]


def _matched(grads: Any, variables: Any) -> tuple[list[tuple[Any, Any]], Any]:
    leaves: list[Any]
    wanted: Any  # a PyTreeDef; its stubs lack comparison
    leaves, wanted = jax.tree.flatten(variables, is_leaf=lambda node: node is None)
    gradients, given = jax.tree.flatten(
        grads, is_leaf=lambda node: node is None or isinstance(node, IndexedSlices)
    )
    if given != wanted:
        hint = "" if _order(variables) else _order(grads)
        # By name, because importing optax here would load it for every program.
        if type(variables).__name__ == "LookaheadParams":
            hint = (
                ". optax.lookahead keeps slow copies of the parameters of its own "
                "choosing; here, keep them as a second tree of variables, and write "
                "them with assign every few steps (docs/optimizers.md, Averages)"
            )
        raise ValueError(
            f"gradients and variables must have the same structure: gradients are "
            f"{given}, variables are {wanted}{hint}"
        )
    return list(zip(gradients, leaves, strict=True)), wanted


def _is_of_examples(gradient: Any, variable: AbstractVariable) -> bool:
    """Returns whether the array is a stack of gradients, one for each of several
    examples."""
    shape = tuple(np.shape(_value(gradient)))
    return len(shape) > len(variable.shape) and shape[1:] == tuple(variable.shape)


def _of_examples(gradient: Any, variable: AbstractVariable) -> Any:
    """Converts a stack of gradients, ``[examples, ...]``, for a variable of this
    process.

    Raises:
        ValueError: The variable is on a parameter server, or sharded.
    """
    spec = variable.components[0].spec
    words, shape = WORDS[UpdateOp.OPTIMIZE], np.shape(_value(gradient))
    _convert.require_own_dtype(spec, _value(gradient), words)
    if len(variable.components) > 1 or spec.ps != LOCAL:
        raise ValueError(
            f"cannot {words} {spec}: shape mismatch. The variable has shape "
            f"{variable.shape}, and the value has shape {shape}; expected "
            f"{variable.shape}. Gradients of single examples (optax.contrib.dpsgd) "
            "need a variable that is stored in the program that computes them, and not "
            "sharded (no scope, MirroredStrategy, MultiWorkerMirroredStrategy): give a "
            "parameter server their sum or their mean"
        )
    if recorder.get() is not None:
        return _convert.traced_operand(spec, gradient, words, examples=True)
    refuse_update(spec, words)
    return _convert.plain_operand(spec, gradient, words, examples=True)


def _arrays(gradient: Any, variable: AbstractVariable) -> tuple[Any, ...]:
    """Converts a gradient to arrays of the variable's shape and dtype, or to indices
    and rows."""
    spec = variable._spec
    is_traced = recorder.get() is not None
    if isinstance(gradient, IndexedSlices):
        words = WORDS[UpdateOp.OPTIMIZE_ROWS]
        _convert.require_own_dtype(spec, _value(gradient.values), words)
        if not is_traced:
            refuse_update(spec, words)
            rows = _convert.plain_rows(spec, gradient.indices, gradient.values, words)
            return rows
        return _convert.traced_rows(spec, gradient.indices, gradient.values, words)
    words = WORDS[UpdateOp.OPTIMIZE]
    gradient = _value(variable._operand(gradient))
    _convert.require_own_dtype(spec, gradient, words)
    if not is_traced:
        refuse_update(spec, words)
        return (_convert.plain_operand(spec, gradient, words),)
    return (_convert.traced_operand(spec, gradient, words),)


def extras_of(extra: dict[str, Any]) -> tuple[Extras, tuple[Any, ...]]:
    """Splits the further arguments of ``apply_gradients`` into arrays and a description
    of their structure with all other objects."""
    from zstrat.optimizers import Extras

    static = {name: value for name, value in extra.items() if not _is_data(value)}
    data = {name: value for name, value in extra.items() if name not in static}
    # A variable as an argument stands for its value now.
    data = jax.tree.map(_value, data, is_leaf=_is_variable)
    leaves, treedef = jax.tree.flatten(data)
    arrays = tuple([jnp.asarray(leaf) for leaf in leaves])
    made: Any = jax.ShapeDtypeStruct  # untyped
    kinds = tuple([made(x.shape, x.dtype) for x in arrays])
    return Extras(treedef, kinds, tuple(static.items())), arrays


def _is_data(value: Any) -> bool:
    """Returns whether all leaves of an argument are arrays, numbers or variables."""
    leaves = jax.tree.leaves(value, is_leaf=_is_variable)
    kinds = (bool, int, float, complex, np.ndarray, np.generic, jax.Array)
    return all(isinstance(leaf, kinds) or _is_variable(leaf) for leaf in leaves)


def _is_variable(value: Any) -> bool:
    return isinstance(value, AbstractVariable)


def _value(value: Any) -> Any:
    return value.value() if _is_variable(value) else value
