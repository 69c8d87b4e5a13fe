"""Traces a user's transformation, and turns its errors into ours.

The program is traced once and runs for each update, so a variable that the
transformation reads (a learning rate) would be a constant of that program.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from zstrat.variables._operators import HYPERPARAMETERS, ArrayWanted
from zstrat.variables._tracing import StagedAccess, recorder

from ._gradient_call import line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.optimizers import TreeRule

    from ._gradient_call import GradientCall


def traced(call: GradientCall, rule: TreeRule, *, is_traced: bool) -> TreeRule:
    """Traces the rule of a call.

    Args:
        is_traced: Trace the update, too; else only the state.

    Raises:
        ValueError: It cannot be traced; quotes the transformation's error.
    """
    from zstrat.optimizers import cut_for_rows

    with _tracing(call):
        if is_traced:
            return cut_for_rows(rule)
        rule.state()
        return rule


@contextmanager
def _tracing(call: GradientCall) -> Iterator[None]:
    """Turns errors inside into ValueErrors that name the optimizer and its tree."""
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
