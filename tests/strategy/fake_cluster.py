"""A cluster without processes: what a strategy and a worker need of one, in numpy."""

import secrets

import numpy as np

from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.coordinator.membership import Membership
from zstrat.errors import InvalidArgumentError
from zstrat.optimizers import Binding
from zstrat.program import digest, dump_code, load, prepare, rebuild
from zstrat.strategy import ParameterServerStrategy
from zstrat.variables import apply
from zstrat.wire import UpdateOp


class FakeSession:
    """A session and the coroutines of its servers, over a dict: none of them waits."""

    recovers = False

    def __init__(self, ps_count, worker_count, devices):
        self.ps_count, self.worker_count, self.devices = ps_count, worker_count, devices
        self.platform = "cpu"
        self.session = self.origin = secrets.randbits(64)
        self.values = {}
        self.specs = {}
        self.slots = {}
        self.transformations = {}
        self.rules = {}
        """By optimizer and variable, of trees that were sent."""
        self.requests = []
        self.entries = []
        self.refuse = None
        self.is_closed = False
        self.membership = Membership(dict.fromkeys(range(worker_count), "worker:1"))

    @property
    def servers(self):
        return self

    @property
    def cluster(self):
        return self

    @property
    def turnover(self):
        return self

    @property
    def moves(self):
        return self

    @property
    def addresses(self):
        return {index: f"ps:{index}" for index in range(self.ps_count)}

    def run(self, work, what, timeout=None):
        try:
            work.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError(f"{what}: waits")

    async def run_async(self, work, what):
        return await work

    async def create_variables(self, variables):
        self.requests.append("create")
        for spec, array in variables:
            assert 0 <= spec.ps < self.ps_count
            assert spec.key not in self.values
            self.values[spec.key], self.specs[spec.key] = array, spec

    async def initialize_variables(self, entries, code):
        """What the parameter servers would do."""
        self.requests.append("initialize")
        self.entries += [entry for _, entry in entries]
        initializer = load(code)
        for spec, entry in entries:
            assert (spec.key, spec.name, spec.dtype) == (
                entry.key,
                entry.name,
                entry.dtype,
            )
            array = initializer(
                entry.whole,
                spec.numpy_dtype,
                partition_shape=entry.shape,
                partition_offset=entry.offset,
            )
            assert array.shape == spec.shape
            assert array.dtype == spec.numpy_dtype
            self.values[spec.key], self.specs[spec.key] = array, spec

    async def delete_variables(self, specs):
        self.requests.append("delete")
        for spec in specs:
            del self.values[spec.key], self.specs[spec.key]

    async def withdraw(self, specs, optimizers):
        self.requests.append("withdraw")
        for spec in specs:
            self.values.pop(spec.key, None)
            self.specs.pop(spec.key, None)
        for optimizer in optimizers:
            self.transformations.pop(optimizer, None)

    def forget_rounds(self, optimizer):
        self.requests.append("forget_rounds")

    async def create_optimizer(self, optimizer_id, name, code, rounds=None):
        if self.refuse is not None:
            raise InvalidArgumentError(f"{name}: {self.refuse}")
        assert optimizer_id > 0
        self.transformations[optimizer_id] = load(code)

    async def read(self, specs):
        self.requests.append("read")
        return [self.values[spec.key] for spec in specs]

    async def read_rows(self, parts):
        self.requests.append("read_rows")
        return [self.values[spec.key][indices] for spec, indices in parts]

    async def update(self, updates):
        self.requests.append("update" if len(updates) == 1 else "update_many")
        operands = {}
        for spec, op, optimizer_id, arrays in updates:
            if op is UpdateOp.OPERANDS:
                operands[spec.ps, optimizer_id] = arrays
            else:
                shared = operands.get((spec.ps, optimizer_id), ())
                self._apply(spec, op, optimizer_id, arrays, shared)

    async def bind_optimizer(self, optimizer_id, data):
        known = self.transformations[optimizer_id]
        binding = Binding.decoded(f"optimizer {optimizer_id}", known, data)
        for rule, keys in zip(binding.rules(), binding.keys, strict=True):
            for key in keys:
                self.rules[optimizer_id, key] = rule

    async def read_slots(self, optimizer_id, specs):
        return [dict(self.slots.get((spec.key, optimizer_id), {})) for spec in specs]

    async def write_slot(self, optimizer_id, spec, name, value):
        if (spec.key, optimizer_id) not in self.slots:
            self.slots[spec.key, optimizer_id] = self._begun(spec.key, optimizer_id)
        assert name in self.slots[spec.key, optimizer_id]
        self.slots[spec.key, optimizer_id][name] = value

    def _begun(self, key, optimizer_id):
        rule = self.rules[optimizer_id, key]
        made = map(np.asarray, rule.init(self.values[key]))
        return dict(zip(rule.names, made, strict=True))

    def _apply(self, spec, op, optimizer_id, arrays, operands=()):
        value = self.values[spec.key]
        if optimizer_id == 0:
            self.values[spec.key] = apply(op, value, tuple(arrays))
            return
        # Rows whose gradient is zero do not move, by the rules that are used here.
        gradient = arrays[0]
        if op is UpdateOp.OPTIMIZE_ROWS:
            gradient = apply(UpdateOp.SCATTER_ADD, np.zeros_like(value), tuple(arrays))
        rule = self.rules[optimizer_id, spec.key]
        slots = self.slots.get((spec.key, optimizer_id))
        if slots is None:
            slots = self._begun(spec.key, optimizer_id)
        mine = [operands[n] for n in rule.uses]
        kept = [slots[name] for name in rule.names]
        moved, after = rule.step(value, kept, gradient, mine)
        after = map(np.asarray, after)
        self.slots[spec.key, optimizer_id] = dict(zip(rule.names, after, strict=True))
        self.values[spec.key] = np.asarray(moved)

    def close(self):
        self.is_closed = True


class FakeCluster:
    """A strategy over a `FakeSession`, and a worker that runs its steps."""

    def __init__(self, ps=2, workers=2, devices=1, **options):
        spec = ClusterSpec(
            {
                "chief": ["localhost:1"],
                "ps": [f"localhost:{10 + i}" for i in range(ps)],
                "worker": [f"localhost:{20 + i}" for i in range(workers)],
            }
        )
        self.session = FakeSession(ps, workers, devices)
        self.resolver = SimpleClusterResolver(spec, task_type="chief", task_id=0)
        self.strategy = ParameterServerStrategy(
            self.resolver, connect=lambda spec, settings: self.session, **options
        )

    def ship(self, function):
        """The function as a worker has it."""
        code = dump_code(function)
        assert digest(code)
        return load(code)

    def run(self, shipped, *args):
        """One step of a shipped function, as a worker runs it."""
        prepared = prepare(shipped, args, {})
        plan = prepared.plan
        session = self.session
        result = prepared.run(session.run(session.read(plan.reads), "reading"))
        for call in plan.calls:
            tree = call.binding().encoded()
            session.run(session.bind_optimizer(call.optimizer.id, tree), "binding")
        updates = [(x.spec, x.op, x.optimizer, x.arrays) for x in result.updates]
        session.run(session.update(updates), "updating")
        return rebuild(
            result.layout.structure, result.leaves, plan.out_structure.treedef
        )
