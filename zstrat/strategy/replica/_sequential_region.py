"""Replicas of one process among several that are given arrays of different shapes, in a
step: each is traced by itself, and all of them are one part of the program.

Other processes may have been given arrays of one shape, whose replicas are one program
(`_region`). All processes do the same collectives together, and a step
does those together whose operands are known at the same time. So here, too, whatever
goes in goes in together, and each stage is one part, of which everything comes out
together.

Law of the file: the step is told in the end, as of a program of all replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from zstrat.program.trace import (
    Capture,
    Discovery,
    Replay,
    has_copies,
    joined,
)
from zstrat.strategy.reduce._values import is_whole
from zstrat.variables import recorder

from ._arguments import UnevenParts, distribute_rows, require_all_one_each, unwrapped
from ._one_program import TracedRegion, needs_sequential
from ._region import in_stages
from ._regroup import regroup
from ._sequential import run_sequentially

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.program.trace import TraceFeed
    from zstrat.variables import TraceRecorder, VariableHandle

    from ._arguments import ReplicaCall

# jax's stubs leave it untyped.
_barrier: Final[Any] = jax.lax.optimization_barrier


def uneven(call: ReplicaCall, devices: Sequence[jax.Device]) -> Any:
    """What the replicas of this process return, brought together. Those of other
    processes may be one program.

    Raises:
        UnevenParts: In a step, where XLA reaches the other processes, so that all run
            one program; or where the replicas look up rows that are not here.
        Exception: As `run_sequentially`.
    """
    team = call.team
    require_all_one_each(call.tree, team.local)
    outside = recorder.get()
    if team.channel is None or outside is None or outside.live:
        found = regroup(run_sequentially(call, devices))
        # With the members of a dict in the order that a program gives them: who reduces
        # one after the other does so with other processes.
        return jax.tree.map(lambda leaf: leaf, found, is_leaf=is_whole)
    if team.channel.mesh is not None:
        raise UnevenParts(
            "strategy.run in a step was given parts of different shapes: with "
            "implementation=XLA the replicas of all processes run one program. Use "
            "batch(..., drop_remainder=True)"
        )
    distributed = call.given(distribute_rows(unwrapped(call.tree), team.local))
    if needs_sequential(distributed):  # in the other processes, too
        return regroup(run_sequentially(call, devices))
    return _in_one_region(_Region(distributed), outside)


def _in_one_region(region: _Region, outside: TraceRecorder) -> Any:
    variables = region.variables()
    held = [
        outside.copies(v) if has_copies(v, region.team.local) else outside.read(v)
        for v in variables
    ]
    keys = [variable.spec.key for variable in variables]

    def one(held: Sequence[Any], inputs: Sequence[Any], _: Any) -> Any:
        known = dict(zip(keys, held, strict=True))
        return region.traced(Replay("strategy.run", known, ()), inputs)

    def mapped(part: Any, own: Sequence[Any], whole: Sequence[Any]) -> Any:
        def together(*given: Any) -> Any:
            # Or what is given back as it came would not be a part of this call.
            return _barrier(part(*given))

        # As a call of which everything depends on all that is given or captured.
        return jax.jit(together)(held, [*region.inputs, *whole], list(own))

    arrays, operands = in_stages(one, mapped, [], len(region.inputs))
    return region.last.recorded_result(outside, arrays, operands)


class _Region:
    """The replicas as a function of arrays, which is traced for each of its stages."""

    def __init__(self, call: ReplicaCall) -> None:
        self.team = call.team
        self._call = call
        self._leaves: list[Any]
        self._treedef: Any  # its stubs lack what we call
        self._leaves, self._treedef = joined.flatten(call.tree)
        self.inputs = [x for x in self._leaves if isinstance(x, jax.core.Tracer)]
        self.last: TracedRegion
        """What the last trace left; there is none before the first."""

    def variables(self) -> list[VariableHandle]:
        """The variables that the replicas use.

        Raises:
            UnevenParts: Rows are looked up that are not here.
        """

        def abstract(seed: jax.Array, inputs: Sequence[Any]) -> None:
            self.traced(Discovery(seed), inputs)

        jax.eval_shape(abstract, jnp.int8(0), list(self.inputs))
        found = self.last.capture
        for lookup in found.lookups:
            raise UnevenParts(
                f"strategy.run was given parts of different shapes, and looks up rows "
                f"of {lookup.table}, which is not in the scope of the strategy: create "
                "it there, or use batch(..., drop_remainder=True)"
            )
        return found.variables

    def traced(self, feed: TraceFeed, inputs: Sequence[Any]) -> Any:
        """Arrays that the replicas return, then copies that they have changed; and the
        operands of their updates."""
        given = iter(inputs)
        leaves = [
            next(given) if isinstance(x, jax.core.Tracer) else x for x in self._leaves
        ]
        call = self._call.given(self._treedef.unflatten(leaves))
        capture = Capture(feed, is_region=True)
        with capture.recording():
            results = run_sequentially(call, ())
        moves = capture.moves.values.values()
        leaves, treedef = joined.flatten(regroup(results))
        changed = [variable for variable, _ in moves]
        self.last = TracedRegion(leaves, treedef, capture, changed)
        operands = [update.operands for update in capture.updates]
        return [*self.last.arrays, *[copies for _, copies in moves]], operands
