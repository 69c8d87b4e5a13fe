"""What an optimizer cannot do with a call, in words.

Everything is refused before anything is sent or computed, with the variables that it is
about and what to write instead.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.optimizers import Coupling, TreeCut, TreeRule

    from ._gradient_call import GradientCall


@contextmanager
def tracing(call: GradientCall) -> Iterator[None]:
    """Says which optimizer and which tree it is that cannot be traced.

    Raises:
        ValueError: With what the transformation said.
    """
    try:
        yield
    except Exception as error:  # of the transformation, to who applies gradients
        if isinstance(error, ValueError) and "asks for the path" in str(error):
            raise
        said = str(error).rstrip(".")
        raise ValueError(
            f"{_line(call)}optimizer {call.optimizer.name!r} cannot be applied to its "
            f"tree, {call.structure.treedef}: {type(error).__name__}: {said}. Labels, "
            "masks and functions of paths have to fit the tree that the optimizer "
            "sees: that of zs.Optimizer(..., params=params), or else that of "
            "apply_gradients(grads, params). Give further arguments of its update "
            "(value=loss) to apply_gradients; what wants functions (obj_fn=) or "
            "gradients of single examples (optax.contrib.dpsgd) runs under strategies "
            "whose processes hold all variables (MirroredStrategy, "
            "MultiWorkerMirroredStrategy), not on parameter servers"
        ) from error


def require_whole(call: GradientCall, cut: TreeCut) -> None:
    """Refuses a call that an optimizer of a whole tree cannot carry out.

    Raises:
        ValueError: Gradients are left out, or are rows.
    """
    assert cut.coupling is not None
    if len(call.given) < len(call.targets):
        left = next(n for n in range(len(call.targets)) if n not in call.given)
        raise ValueError(
            f"{_line(call)}optimizer {call.optimizer.name!r} moves the variables of "
            f"its tree together ({_coupled(call, cut.coupling)}), and there is no "
            f"gradient of {call.words(left)}: give zeros for it, or leave it out of "
            "params= and of every call"
        )
    for leaf, _, sparse, _ in call.leaves():
        if sparse:
            raise ValueError(
                f"{_line(call)}optimizer {call.optimizer.name!r} looks at more than "
                f"one row at a time, because it moves the variables of its tree "
                f"together ({_coupled(call, cut.coupling)}), so it cannot take "
                f"IndexedSlices of {call.words(leaf)}: give it the dense gradient, "
                "slices.to_dense()"
            )


def require_by_leaf(call: GradientCall, tree: TreeRule) -> None:
    """Refuses a call that an optimizer cannot carry out variable by variable.

    Raises:
        ValueError: Gradients are left out that others depend on; or there are rows, or
            parts of a variable, and the optimizer does not treat each row by itself.
    """
    cut = tree.cut()
    missing = sorted(cut.gradients_for(call.given) - {*call.given})
    if missing:
        raise ValueError(
            f"{_line(call)}optimizer {call.optimizer.name!r} computes something of "
            "all gradients of its tree (a global norm, a common test), and there is "
            f"none of {call.words(missing[0])}: give zeros for it, or leave it out of "
            "params= and of every call"
        )
    from zstrat.optimizers import dependence_on_padding

    for leaf, target, sparse, _ in call.leaves():
        if not sparse and len(target.components) == 1:
            continue
        reason = call.optimizer.leaf_rule(tree, leaf).row_dependence
        if not reason and sparse and cut.operands:
            reason = dependence_on_padding(tree, leaf)
        if reason:
            raise _by_rows(call, leaf, sparse, reason)


def require_servers(call: GradientCall, tree: TreeRule) -> None:
    """Refuses an optimizer that parameter servers cannot run, or cannot run here.

    Raises:
        ValueError: It couples variables, or as `require_by_leaf`.
    """
    cut = tree.cut()
    acts = cut.program.acts
    if acts:
        raise ValueError(
            f"{_line(call)}optimizer {call.optimizer.name!r} calls back into Python "
            f"({acts}), which a parameter server does not run: take the callback out"
        )
    if cut.coupling is not None:
        raise ValueError(
            f"{_line(call)}optimizer {call.optimizer.name!r} mixes variables, which "
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
                f"{_line(call)}optimizer {call.optimizer.name!r} begins with {slot}, "
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
        f"{_line(call)}optimizer {call.optimizer.name!r} looks at more than one row "
        f"at a time, so it cannot {what} {call.words(leaf)}: {reason}. {cure}, or use "
        "an optimizer that works element by element (sgd, adam, adagrad, rmsprop, "
        "lion, ...)"
    )


def _line(call: GradientCall) -> str:
    return f"{call.where}: " if call.where else ""
