"""A program of which every closed round is known, and its replay in numpy."""

import contextlib
import itertools
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zstrat as zs

MOST = 256
"""Steps that a program may make."""
HALF = np.float32(0.5)
"""Rate and momentum: products with it are exact, so the order of sums is all that may
change a bit."""


class Hold:
    """A worker waits in its next step, when it has read, until `release`."""

    def __init__(self, place):
        os.mkfifo(place)
        self._place, self._end = place, None

    def wait(self):
        """Until the worker is in that step."""
        self._end = open(self._place, "w")  # noqa: SIM115

    def release(self):
        """It goes on, and waits in no other step. If it is gone, its successor does
        not wait, either."""
        self._place.unlink(missing_ok=True)
        if self._end is not None:
            self._end.close()


class Logged:
    """Each step contributes ``w - target`` and its own slot of ``log``; contributions
    are summed. The log gets for each step the number of the round that it was merged
    in, from 1; it stays 0 if its contribution was dropped.

    ``folder`` is for the pipes of `hold`.
    """

    def __init__(self, strategy, rounds, folder):
        rng = np.random.default_rng(0)
        self.folder = Path(folder)
        self.start = rng.normal(size=3).astype("f4")
        self.targets = rng.normal(size=(MOST, 3)).astype("f4")
        self.values = []
        with strategy.scope():
            self.params = {
                "w": zs.Variable(self.start),
                "log": zs.Variable(np.zeros(MOST, np.float32)),
            }
            self.optimizer = zs.Optimizer(
                optax.multi_transform(
                    {
                        "w": optax.sgd(0.5, momentum=0.5),
                        "log": optax.scale_by_schedule(lambda count: count + 1.0),
                    },
                    {"w": "w", "log": "log"},
                ),
                "logged",
                params=self.params,
                rounds=replace(rounds, merge="sum"),
            )
        self.coordinator = zs.ClusterCoordinator(strategy)
        self._workers = iter(
            self.coordinator.create_per_worker_dataset(
                lambda context: itertools.repeat(np.int32(context.input_pipeline_id))
            )
        )
        params, optimizer, place = self.params, self.optimizer, str(folder)

        def wait(read, worker):
            pipe = os.path.join(place, f"hold-{worker}")
            if os.path.exists(pipe):
                with open(pipe) as end:
                    end.read()
            return np.asarray(read)

        @zs.function
        def step(workers, number, target):
            read = params["w"].value()
            shape = jax.ShapeDtypeStruct(read.shape, read.dtype)
            read = jax.pure_callback(wait, shape, read, next(workers))
            slot = jax.nn.one_hot(number, MOST, dtype=jnp.float32)
            optimizer.apply_gradients({"w": read - target, "log": slot}, params)
            return read

        self._step = step

    def schedule(self, count):
        """Schedules so many steps."""
        for _ in range(count):
            number = len(self.values)
            given = self._workers, np.int32(number), self.targets[number]
            self.values.append(self.coordinator.schedule(self._step, args=given))

    def run(self, count):
        """Makes so many steps, and closes their rounds."""
        self.schedule(count)
        self.coordinator.join()

    @contextlib.contextmanager
    def hold(self, worker):
        hold = Hold(self.folder / f"hold-{worker}")
        try:
            yield hold
        finally:
            hold.release()

    @contextlib.contextmanager
    def ended(self, count):
        """Waits until so many of the steps have ended; by the end of the block, which
        lets them, all others have, too."""
        with ThreadPoolExecutor(len(self.values)) as threads:
            asked = [threads.submit(value.fetch) for value in self.values]
            for _ in itertools.islice(as_completed(asked), count):
                pass
            yield

    @property
    def metrics(self):
        return self.coordinator.metrics()["rounds"]["logged"]

    def replayed(self):
        """Asserts that all is as in a replay of the closed rounds; returns their
        members, and the steps whose contributions were late."""
        reads = [value.fetch() for value in self.values]
        log = self.params["log"].numpy()
        assert not log[len(reads) :].any()
        w, trace, seen, rounds = self.start, np.zeros(3, np.float32), [], []
        for number in range(1, self.metrics["closed"] + 1):
            seen.append(w)
            members = np.flatnonzero(log == number).tolist()
            assert members, (number, log[: len(reads)].tolist())
            total = np.zeros(3, np.float32)
            for step in members:
                total = total + (reads[step] - self.targets[step])
            trace = total + HALF * trace
            w = w - HALF * trace
            rounds.append(members)
        seen.append(w)
        np.testing.assert_array_equal(self.params["w"].numpy(), w)
        late = []
        for step, read in enumerate(reads):
            (base,) = [n for n, each in enumerate(seen) if np.array_equal(each, read)]
            if log[step] != base + 1:
                assert log[step] in (0, *range(base + 2, len(rounds) + 1))
                late.append(step)
        assert sum(map(len, rounds)) + np.sum(log[: len(reads)] == 0) == len(reads)
        metrics = self.metrics
        assert sum(metrics["late"].values()) == len(late)
        dropped = [step for step in late if not log[step]]
        assert sum(metrics["dropped"].values()) == len(dropped)
        assert metrics["waiting"] == 0
        return rounds, late
