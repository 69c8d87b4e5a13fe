"""What a coordinator keeps of a worker: which steps have ended, and with what."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from zstrat import errors
from zstrat.program import Resource, rebuild
from zstrat.wire import Outcome, Printed


class It(Resource):
    """Stands for a per-worker iterator among the arguments."""

    def __init__(self, resource):
        self.resource = resource


class Coordinator:
    """``remote`` keeps the notices that come."""

    def __init__(self, remote):
        self.remote = remote
        self.numbers = itertools.count(1)
        self.layouts, self.ends, self.seen = {}, {}, 0
        self.doubtful = set()

    async def outcomes(self, steps):
        """What became of the steps: values, or errors; each is asserted to end once."""
        steps = list(steps)
        async with asyncio.timeout(100):
            while True:
                self._read()
                if all(step in self.ends for step in steps):
                    return [self.ends[step] for step in steps]
                self.remote.notified.clear()
                await self.remote.notified.wait()

    async def run(self, digest, steps, arguments=0, **more):
        self.dispatch(digest, steps, arguments, **more)
        return await self.outcomes(steps)

    def forget(self, *steps):
        for step in steps:
            del self.ends[step]

    def it(self, resource):
        """Stands for the iterator of that number among the arguments."""
        return It(resource)

    def _read(self):
        for message in self.remote.notices[self.seen :]:
            if isinstance(message, Printed):
                continue
            self.layouts.update({layout.layout: layout for layout in message.layouts})
            at = 0
            for done in message.completions:
                assert done.step not in self.ends, f"step {done.step} ended twice"
                size = max(done.size, 0)
                data = message.results[at : at + size]
                at += size
                self.ends[done.step] = self._outcome(done, data)
                if done.outcome == Outcome.DOUBTFUL:
                    self.doubtful.add(done.step)
            assert at == len(message.results)
        self.seen = len(self.remote.notices)

    def _outcome(self, done, data):
        if done.outcome == Outcome.CANCELLED:
            return "cancelled" if done.error is None else errors.from_wire(done.error)
        if done.outcome in (Outcome.FAILED, Outcome.DOUBTFUL):
            return errors.from_wire(done.error)
        layout = self.layouts[done.layout]
        if done.size < 0:
            return "kept"
        leaves, at = [], 0
        for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True):
            leaf = np.frombuffer(
                data, np.dtype(dtype), int(np.prod(shape, dtype=int)), at
            )
            at += leaf.nbytes
            leaves.append(leaf.reshape(shape))
        assert at == len(data)
        return rebuild(layout.structure, leaves)
