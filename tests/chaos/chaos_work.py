"""Updates that are counted, and what may have become of them.

Every update adds one to a slot. A variable must show exactly what was acknowledged,
besides what ended without anybody knowing whether it was applied.
"""

import re
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

import zstrat as zs

SLOTS = 512
BATCH = 40
WAYS = "left", "right"
"""Variables of the eager steps that run another way when they run again."""
PACE = 0.01
"""Seconds between two own updates, at least: enough of them, and time for others."""


class Count:
    """What is known of the slots of one variable."""

    def __init__(self, slots):
        self.done, self.unknown = np.zeros(slots), np.zeros(slots)

    def check(self, values, name):
        """How many updates are missing, and how many are there too often."""
        missing = np.maximum(self.done - values, 0).sum()
        doubled = np.maximum(values - self.done - self.unknown, 0).sum()
        print(
            f"  {name}: {self.done.sum():.0f} acknowledged, {self.unknown.sum():.0f} "
            f"of unknown end; {missing:.0f} lost, {doubled:.0f} doubled"
        )
        return missing, doubled


class Work:
    """Dense steps, steps that update rows on all servers, eager steps that push several
    times, and updates of the program's own, until `stop`. ``words`` are the errors that
    came of it, by their text; between two batches of steps are ``pause`` seconds. With
    ``wavers`` some eager steps go another way when they run again."""

    def __init__(self, strategy, pause=0.0, wavers=False):
        self._pause = pause
        self.words = Counter()
        self.errors = []
        self._coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            self._dense, self._left, self._right = (
                zs.Variable(np.zeros(SLOTS, np.float32), name=name)
                for name in ("dense", *WAYS)
            )
            self._table = zs.Variable(np.zeros((SLOTS, 1), np.float32), name="table")
            self._own = [
                zs.Variable(np.zeros((), np.float32), name=f"own{n}") for n in range(2)
            ]
        self._steps = [*self._traced(), *self._traced(), self._eager()]
        self._steps += [self._wavering()] if wavers else []
        self._counts = {name: Count(SLOTS) for name in ("dense", "table", *WAYS)}
        self._own_count = Count(2)
        self._stopping = threading.Event()
        self.progress = threading.Semaphore(0)
        """Released with each batch of steps that ended well."""
        self._threads = [
            threading.Thread(target=work, name=f"chaos {work.__name__}")
            for work in (self._schedule, self._update)
        ]

    def start(self):
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def verdict(self):
        """Updates lost and doubled, in all."""
        found = [
            self._counts["dense"].check(self._dense.numpy(), "dense"),
            self._counts["table"].check(self._table.numpy()[:, 0], "rows"),
            self._counts["left"].check(self._left.numpy(), "left"),
            self._counts["right"].check(self._right.numpy(), "right"),
            self._own_count.check(np.array([v.numpy() for v in self._own]), "own"),
        ]
        return tuple(int(number) for number in np.sum(found, 0))

    def _traced(self):
        dense, table = self._dense, self._table

        @zs.function
        def add(i):
            dense.assign_add(jax.nn.one_hot(i, SLOTS, dtype=jnp.float32))

        @zs.function
        def add_rows(i):
            dense.assign_add(jax.nn.one_hot(i, SLOTS, dtype=jnp.float32))
            both = jnp.stack([i, SLOTS - 1 - i])
            table.scatter_add(zs.IndexedSlices(jnp.ones((2, 1)), both))

        return (add, {"dense": 1}), (add_rows, {"dense": 1, "table": 1})

    def _eager(self):
        dense, table, own = self._dense, self._table, tuple(self._own)

        @zs.function(eager=True)
        def add_in_parts(i):
            one = np.zeros(SLOTS, np.float32)
            one[i] = 1
            for variable in own:  # on one server each: a part of each push
                dense.assign_add(one)
                variable.value()
            both = np.array([i, SLOTS - 1 - i])
            table.scatter_add(zs.IndexedSlices(np.ones((2, 1), np.float32), both))
            dense.value()
            dense.assign_add(one)

        return add_in_parts, {"dense": len(own) + 1, "table": 1}

    def _wavering(self):
        ways = self._left, self._right

        @zs.function(eager=True)
        def go_another_way(i):
            one = np.zeros(SLOTS, np.float32)
            one[i] = 1
            turn = zs.get_worker_context().attempt % 2
            ways[turn].assign_add(one)
            ways[turn].value()
            ways[1 - turn].assign_add(one)

        return go_another_way, dict.fromkeys(WAYS, 1)

    def _schedule(self):
        slot = 0
        while not self._stopping.is_set():
            under_way = []
            try:
                for _ in range(BATCH):
                    slot = (slot + 1) % (SLOTS // 2)
                    step, touched = self._steps[slot % len(self._steps)]
                    value = self._coordinator.schedule(step, args=(slot,))
                    under_way.append((value, slot, touched))
                self._coordinator.join()
            except Exception as error:
                self._heard(error)
                self._stopping.wait(0.2)  # it is said until it is over
            else:
                self.progress.release()
            self._take(under_way)
            self._stopping.wait(self._pause)

    def _take(self, under_way):
        for value, slot, touched in under_way:
            error = value.error if value.is_ready else None
            if isinstance(error, zs.CancelledError):
                continue
            if error is not None:
                self._heard(error)
            known = value.is_ready and error is None
            for name, often in touched.items():
                count = self._counts[name]
                at = count.done if known else count.unknown
                at[slot] += often
                if name == "table":
                    at[SLOTS - 1 - slot] += often

    def _update(self):
        turn = 0
        while not self._stopping.wait(max(PACE, self._pause / 10)):
            turn = 1 - turn
            try:
                self._own[turn].assign_add(np.float32(1))
            except Exception as error:
                self._heard(error)
                refused = isinstance(error, zs.PSUnavailableError)
                self._own_count.unknown[turn] += 1
                if refused:
                    self._stopping.wait(0.2)
            else:
                self._own_count.done[turn] += 1

    def _heard(self, error):
        self.errors.append(error)
        text = re.sub(r"\d+", "#", str(error))  # of one kind, whichever step it was
        self.words[f"{type(error).__name__}: {text}"[:200]] += 1
