"""What a context of jax has set, where replicas take turns.

jax keeps its settings per thread, and replicas in turns share one: what one has set
when it lets the others run would be theirs, and left in an order that is not the
reverse of entering it would stay for ever. Names for profiles (`jax.named_scope`) are
put back for the others and for itself; of everything else jax offers no way to do so
that leaves no trace, and it is refused.

Law of the file: nothing is set here but names.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

import jax
from jax.extend import source_info_util

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_CONTEXTS: Final = {
    "jax_enable_x64": "jax.enable_x64",
    "jax_default_device": "jax.default_device",
    "jax_default_matmul_precision": "jax.default_matmul_precision",
    "jax_disable_jit": "jax.disable_jit",
    "jax_numpy_rank_promotion": "jax.numpy_rank_promotion",
    "jax_numpy_dtype_promotion": "jax.numpy_dtype_promotion",
    "jax_default_prng_impl": "jax.default_prng_impl",
    "jax_threefry_partitionable": "jax.threefry_partitionable",
    "jax_debug_nans": "jax.debug_nans",
    "jax_debug_infs": "jax.debug_infs",
    "jax_check_tracer_leaks": "jax.check_tracer_leaks",
    "jax_log_compiles": "jax.log_compiles",
    "jax_transfer_guard_host_to_device": "jax.transfer_guard",
    "jax_transfer_guard_device_to_device": "jax.transfer_guard",
    "jax_transfer_guard_device_to_host": "jax.transfer_guard",
}
"""Settings, and the context managers that make them."""

_read: Final = operator.attrgetter(*_CONTEXTS)


class JaxSettings:
    """The settings of this thread when this is made."""

    __slots__ = ("_mesh", "_names", "_values")

    def __init__(self) -> None:
        self._values = _read(jax.config)
        self._mesh = jax.sharding.get_abstract_mesh()
        self._names = source_info_util.current_name_stack()

    def require_unchanged(self, what: str) -> None:
        """Refuses to let others run under other settings.

        Raises:
            RuntimeError: One has been changed.
        """
        values = _read(jax.config)
        if values == self._values and jax.sharding.get_abstract_mesh() == self._mesh:
            return
        changed = [
            name
            for name, before, now in zip(
                _CONTEXTS.values(), self._values, values, strict=True
            )
            if before != now
        ]
        context = changed[0] if changed else "jax.set_mesh"
        raise RuntimeError(
            f"{what} inside `with {context}(...)`, in a replica function that runs in "
            "turns with the others: jax keeps this setting per thread, so it would be "
            "theirs too, and stay. Leave the context before and enter it again after, "
            "or enter it around strategy.run"
        )

    def names(self) -> AbstractContextManager[Any]:
        """While entered, the names for profiles are those of then."""
        context: AbstractContextManager[Any]
        context = source_info_util.set_name_stack(self._names)
        return context
