"""Workers that run windows in this process, with a server that is optax: no daemons."""

import jax.numpy as jnp
import numpy as np
import optax

import zstrat as zs
from zstrat.program import SEGMENT, prepare, window_of
from zstrat.variables import RESIDENT, VariableSpec, creator, unbound
from zstrat.wire import RoundNumber, UpdateOp
from zstrat.worker import Residents


class Creator:
    """Registers optimizers at no server."""

    def __init__(self):
        self.count = 0

    def register_optimizer(self, optimizer):
        self.count += 1
        return self.count

    def forget_optimizer(self, optimizer):
        pass

    def create_variables(self, requests):
        self.count += 1
        return [
            unbound(
                VariableSpec(
                    1000 + self.count, x.name, x.initial_value.shape, "float32", 0
                )
            )
            for x in requests
        ]


CREATOR = Creator()
_GRADIENTS = (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS)


def local_optimizer(inner, outer, **options):
    before = creator.set(CREATOR)
    try:
        return zs.LocalOptimizer(inner, outer, **options)
    finally:
        creator.reset(before)


def variables_like(values):
    """Handles of variables on a server, with the shapes and dtypes of these values."""
    return {
        name: unbound(VariableSpec(100 + n, name, x.shape, x.dtype.name, 0))
        for n, (name, x) in enumerate(values.items())
    }


class Servers:
    """The values, the outer optimizer, and the open round."""

    def __init__(self, values, outer):
        self.values = {100 + n: jnp.asarray(x) for n, x in enumerate(values.values())}
        self.names = dict(zip(self.values, values, strict=True))
        self.outer, self.round = outer, 0
        self.states = {key: outer.init(x) for key, x in self.values.items()}
        self.waiting = []
        self.plain = {}
        """Values of variables that no optimizer moves, zeros at first."""

    def value(self, spec):
        if spec.key in self.values:
            return np.asarray(self.values[spec.key])
        return self.plain.setdefault(spec.key, np.zeros(spec.shape, spec.dtype)).copy()

    def update(self, update):
        """Makes a plain update of rows."""
        indices, rows = update.arrays
        if update.op is UpdateOp.SCATTER_MAX:
            np.maximum.at(self.plain[update.spec.key], indices, rows)
        else:
            assert update.op is UpdateOp.SCATTER_UPDATE
            self.plain[update.spec.key][indices] = rows

    def close(self):
        """Closes the round with the mean of what waits."""
        keys = {key for each in self.waiting for key in each}
        for key in keys:
            given = [each.get(key, 0.0) for each in self.waiting]
            mean = sum(given[1:], given[0]) / len(given)
            moved, self.states[key] = self.outer.update(
                mean, self.states[key], self.values[key]
            )
            self.values[key] = optax.apply_updates(self.values[key], moved)
        self.waiting, self.round = [], self.round + 1

    def now(self):
        return {self.names[key]: np.asarray(x) for key, x in self.values.items()}


class Worker:
    def __init__(self, window, servers):
        self.window, self.servers = window, servers
        self.residents, self.steps = Residents(), 0
        self.speed = None
        """Steps per second, if it is measured."""

    def run(self, *args, step=None, settle=True):
        """Runs one window; its contribution waits on the servers. Returns the result;
        None if the worker sends it back."""
        if step is None:
            self.steps += 1
            step = self.steps
        kwargs, place = {}, None
        if (exchanges := window_of(self.window)) is not None:
            place = self.residents.take_place(exchanges)
            kwargs = {SEGMENT: place.segment}
        work = prepare(self.window, args, kwargs)
        plan = work.plan
        if place and not self.residents.may_run(step, place, plan.reads):
            work.unread()
            return None
        pulled = [self.servers.value(x) for x in plan.reads if x.ps != RESIDENT]
        self.rows = [(x.name, at.tolist()) for x, at in work.wanted.rows]
        self.whole = [x.name for x in plan.reads if x.ps != RESIDENT]
        pulled += [self.servers.value(x)[at] for x, at in work.wanted.rows]
        self.pulled, self.began = len(pulled), work.may_begin
        if work.may_begin:
            work.begin(self.residents.early(plan.reads, step, place))
        at = RoundNumber(0 if place is None else place.optimizer, self.servers.round)
        result = work.run(self.residents.filled(plan.reads, pulled, step, at))
        kept = [x for x in result.updates if x.spec.ps == RESIDENT]
        self.residents.put(step, kept, place)
        if place is not None and self.speed:
            self.residents.took(place, place.steps / self.speed)
        if settle:
            self.residents.settle(step, failed=False)
        due = place is None or self.residents.has_run(place, self.servers.round)
        shared = [x for x in result.updates if x.spec.ps != RESIDENT]
        self.sent = [x for x in shared if x.optimizer]
        for update in shared:
            if not update.optimizer:
                self.servers.update(update)
        self.servers.waiting.append(
            {x.spec.key: _dense(x) for x in self.sent if x.op in _GRADIENTS}
            if due
            else {}
        )
        return plan.out_structure.unflatten(result.leaves)


def _dense(update):
    if update.op is UpdateOp.OPTIMIZE:
        return jnp.asarray(update.arrays[0])
    indices, rows = update.arrays
    return jnp.zeros(update.spec.shape).at[indices].set(rows)
