"""A user's transformation while it is traced: what it must not do, and what it says.

Its program is traced once and runs for each update, so a variable that it reads
meanwhile (a learning rate, a schedule of one) would be a constant of that program.
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
    """The rule of a call, traced.

    Args:
        is_traced: Its update, too; else its state alone.

    Raises:
        ValueError: It cannot be traced; says what the transformation said.
    """
    from zstrat.optimizers import cut_for_rows

    with _tracing(call):
        if is_traced:
            return cut_for_rows(rule)
        rule.state()
        return rule


@contextmanager
def _tracing(call: GradientCall) -> Iterator[None]:
    """Refuses what is read of variables, and says which optimizer and which tree it is
    that cannot be traced."""
    # The step that is being traced sees none of it: its values belong to that trace,
    # and the program that is made here is kept.
    token = recorder.set(None)
    try:
        yield
    except (StagedAccess, ArrayWanted) as error:
        raise ValueError(
            f"{line_of(call)}optimizer {call.optimizer.name!r} reads {error.variable} "
            "while it is traced, and would keep the value of now for all updates: "
            f"{HYPERPARAMETERS}. What else changes from update to update, give to "
            "apply_gradients as a further argument of the transformation's update"
        ) from error
    except Exception as error:  # of the transformation, to who applies gradients
        # Our own words already (`TreeStructure`): they say what to do.
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
