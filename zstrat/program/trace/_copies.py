"""Variables of which each replica has a copy of its own.

They are kept as one array ``[count, ...]`` over the devices, a row on each, in their
`DeviceHome`. A replica reads and updates its row; who stands outside of the replicas
has the first row, or what the variable's rule makes of all of them.

Law of the file: a variable begins with equal copies as one array that all replicas
share, and is kept apart from the moment that one of them updates its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zstrat.variables import (
    DeviceHome,
    KeepsCopies,
    VariableAggregation,
    VariableSynchronization,
    recorder,
)

if TYPE_CHECKING:
    from zstrat.variables import TraceRecorder, VariableHandle


def updates_copies(variable: VariableHandle, count: int) -> bool:
    """Whether each of this many replicas, when it updates the variable, updates its own
    copy alone."""
    home = variable.home
    if not isinstance(home, DeviceHome) or not home.residence.copies == count > 1:
        return False
    if is_on_read(variable):
        return True
    # Where all share one copy it cannot be updated by each for itself (TF's rule).
    shares = home.residence.travels
    return not shares and variable.aggregation is VariableAggregation.NONE


def has_copies(variable: VariableHandle, count: int) -> bool:
    """Whether each of this many replicas has its own now."""
    home = variable.home
    if not isinstance(home, DeviceHome) or not home.is_apart:
        return False
    if home.residence.copies != count:
        raise ValueError(
            f"{variable.spec} has one value for each of {home.residence.copies} "
            f"replicas, and is used by a strategy of {count}: use the strategy that it "
            "was created with"
        )
    return True


def is_apart(variable: VariableHandle) -> bool:
    """Whether each replica has its own now."""
    home = variable.home
    return isinstance(home, DeviceHome) and home.is_apart


def spread(variable: VariableHandle, value: jax.Array) -> jax.Array:
    """The copies, ``[count, ...]``, of these or of a value that all of them share."""
    if value.ndim > len(variable.shape):
        return value
    home = variable.home
    assert isinstance(home, DeviceHome)
    return jnp.broadcast_to(value, (home.residence.copies, *value.shape))


def is_on_read(variable: VariableHandle) -> bool:
    """Whether its copies are brought together when it is read."""
    return variable.synchronization is VariableSynchronization.ON_READ


def apart_from_now(variable: VariableHandle) -> None:
    """Keeps a copy for each replica, all equal so far.

    Raises:
        DataLossError: The value is lost.
    """
    home = variable.home
    assert isinstance(home, DeviceHome)
    with home.residence.turn:  # another thread may come here, too
        if home.is_apart:
            return
        home.require_kept(variable.name)
        # In a trace, too: what happens to the value is no part of the program.
        with jax.ensure_compile_time_eval():
            home.part()


def shown_to(recording: TraceRecorder, variable: VariableHandle) -> jax.Array:
    """The value that is read under this recorder: outside of replicas, what is brought
    together when it is read is made of all copies."""
    if not is_on_read(variable):
        return recording.read(variable)
    before = recorder.set(recording)  # and none that has something in its place
    try:
        value: jax.Array = variable.value()
        return value
    finally:
        recorder.reset(before)


def copies_of(recording: TraceRecorder, variable: VariableHandle) -> Any:
    """All copies, ``[count, ...]``, as the step sees them."""
    assert isinstance(recording, KeepsCopies), recording
    return recording.copies(variable)


def keep_copies(
    recording: TraceRecorder, variable: VariableHandle, copies: Any
) -> None:
    """The copies from now on."""
    assert isinstance(recording, KeepsCopies), recording
    recording.put_copies(variable, copies)
