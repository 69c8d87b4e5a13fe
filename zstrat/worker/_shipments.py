"""Handles what a coordinator ships to a worker: code, resources, and inputs of
closures.

Code and resources are unpickled and built on the executor thread. Their errors are sent
as answers, with the lines of the user's code, and do not end the thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zstrat.errors import ProtocolError
from zstrat.program import BESIDE
from zstrat.wire import Done, Failure, ResourceBuilt

from . import _closure

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.wire import Batch, BuildResource, Dispatch, Message

    from ._step_runner import StepRunner


def answered(work: Callable[[], Message | None]) -> Message:
    """Returns what ``work`` answers, or its error in wire form, with the user's lines.
    For the executor thread."""
    try:
        return work() or Done()
    except BaseException as error:  # goes to the coordinator
        return Failure(_closure.plain(error))


def with_inputs(message: Dispatch) -> list[tuple[Batch, list[memoryview]]]:
    """Returns the batches of a message, each with the inputs of its steps, if they have
    any.

    Raises:
        ProtocolError: The inputs do not have the sizes that the batches say.
    """
    joint, start, count = memoryview(message.inputs), 0, 0
    parts = []
    for batch in message.batches:
        size, steps = batch.size, len(batch.steps)
        # Small inputs travel joined; large ones are arrays of their own, which the
        # codec need not copy into one buffer.
        if size < BESIDE:
            end = start + size * steps
            inputs = [joint[at : at + size] for at in range(start, end, max(size, 1))]
            start = end
        else:
            arrays = message.arrays[count : count + steps]
            inputs = [_bytes_beside(array, size) for array in arrays]
            count += steps
        parts.append((batch, inputs))
    # A sender that counts otherwise would shift inputs from one closure to another.
    if (start, count) != (len(joint), len(message.arrays)):
        raise ProtocolError(
            f"Dispatch: expected {start} bytes of inputs and {count} arrays, as its "
            f"batches say, got {len(joint)} and {len(message.arrays)}"
        )
    return parts


def _bytes_beside(array: np.ndarray, size: int) -> memoryview:
    if array.dtype != np.uint8 or array.shape != (size,):
        raise ProtocolError(
            f"Dispatch.arrays: expected uint8 [{size}] as its batch says, got "
            f"{array.dtype} {list(array.shape)}"
        )
    return array.data


def build(runner: StepRunner, message: BuildResource) -> Message:
    """Builds a resource; answers with its layout."""
    try:
        layout = runner.build(message)
        return ResourceBuilt(layout, runner.resources.examples(message.resource))
    finally:
        runner.end_lines()
