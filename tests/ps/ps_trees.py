"""Trees of optimizers, as whoever applies gradients tells them to a server."""

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.optimizers import Binding, TreeRule, TreeStructure, checked
from zstrat.wire import BindOptimizer


def binding(transformation, tree, gradients=None, wide=None) -> Binding:
    """Of a pytree of ``(keys, shape, dtype)``, a leaf each.

    Args:
        gradients: The dtype of all gradients; None: each has its variable's.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_leaf)
    dtypes = [jnp.dtype(dtype) for _, _, dtype in leaves]
    if wide is None:
        wide = any(dtype.itemsize > (8 if dtype.kind == "c" else 4) for dtype in dtypes)
    with jax.enable_x64(wide or jax.config.jax_enable_x64):
        kinds = [
            jax.ShapeDtypeStruct(shape, dtype)
            for (_, shape, _), dtype in zip(leaves, dtypes, strict=True)
        ]
    rule = TreeRule(
        "mine",
        checked(transformation),
        TreeStructure(treedef),
        tuple(kinds),
        tuple(jnp.dtype(gradients) if gradients else dtype for dtype in dtypes),
        wide=wide,
    )
    return Binding(rule, tuple(keys for keys, _, _ in leaves))


def of_values(transformation, values, gradients=None) -> Binding:
    """A tree ``{"v<key>": ...}`` of variables by key, each whole on one server."""
    tree = {f"v{key:05}": ((key,), x.shape, x.dtype) for key, x in values.items()}
    return binding(transformation, tree, gradients)


def message(session, optimizer: int, told: Binding) -> BindOptimizer:
    """As it is sent."""
    data = np.frombuffer(told.encoded(), np.uint8)
    return BindOptimizer(session, optimizer, (data,))


def bind(store, optimizer: int, told: Binding) -> None:
    """Tells a store of this process."""
    data = np.frombuffer(told.encoded(), np.uint8)
    plan = store.plan_binding(optimizer, (data,))
    if hasattr(plan, "compute"):
        plan.compute()
        store.commit(plan)


def bind_each(store, optimizer: int, transformation, keys, gradients=None) -> None:
    """Each of these variables as a tree of its own, as pieces of none: for optimizers
    that look at no other."""
    for held in store.variables.find(keys):
        cell = held.cell
        tree = {"w": ((held.entry.key,), cell.shape, cell.dtype)}
        bind(store, optimizer, binding(transformation, tree, gradients))


def _is_leaf(x) -> bool:
    return isinstance(x, tuple) and len(x) == 3 and isinstance(x[0], tuple)
