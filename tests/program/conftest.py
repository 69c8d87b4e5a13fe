"""`DictStorage`: a storage that is a dict of numpy arrays."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zstrat.variables import (
    DevicePool,
    DeviceStorage,
    Optimizer,
    ShardedVariable,
    Variable,
    VariableSpec,
    apply,
    creator,
    handle,
)
from zstrat.wire import UpdateOp


class Here(DevicePool):
    """One device of this process."""

    sharding = sharding_apart = None
    formation = 0
    """How often its processes were formed anew."""

    def place(self, array):
        return jnp.array(array)

    place_apart = place

    def fingerprint(self):
        return self.formation

    def settle(self):
        pass


class DictStorage:
    """Values by key; optimizers by id, run by optax on one variable at a time."""

    def __init__(self) -> None:
        self.values: dict[int, np.ndarray] = {}
        self.slots: dict[tuple[int, int], Any] = {}
        self.reads = 0
        self.requests: list[list[tuple[str, list[int]]]] = []
        self.updates: list[tuple[str, UpdateOp, tuple[np.ndarray, ...]]] = []
        self._keys = itertools.count(1)

    def variable(self, value: Any, name: str = "v") -> Variable:
        value = np.array(value)
        key = next(self._keys)
        self.values[key] = value
        spec = VariableSpec(key, name, value.shape, value.dtype.name, ps=0)
        return handle(spec, self)

    def on_devices(self, value: Any, name: str = "v") -> Variable:
        """One that a step moves itself."""
        variable = self.variable(value, name)
        here = Here(["/job:localhost/replica:0/task:0/device:CPU:0"])
        return handle(variable.spec, DeviceStorage(np.array(value), here))

    def sharded(self, value: Any, parts: int = 2, name: str = "t") -> ShardedVariable:
        """A variable whose first rows are one more per component than the others."""
        pieces = np.array_split(np.array(value), parts)
        made = [self.variable(x, f"{name}/part_{i}") for i, x in enumerate(pieces)]
        return ShardedVariable(made, name)

    def whole(self, variable: Any) -> np.ndarray:
        """The present value, unseen by the step."""
        parts = [self.values[part.spec.key] for part in variable.components]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def optimizer(self, rule: Any, params: Any = None) -> Optimizer:
        """An optimizer as a scope makes it: known where the variables live."""
        token = creator.set(self)
        try:
            return Optimizer(rule, params=params)
        finally:
            creator.reset(token)

    def create_variables(self, requests):
        return [self.variable(r.initial_value, r.name) for r in requests]

    def register_optimizer(self, optimizer) -> int:
        return next(self._keys)

    def read(self, variable: Variable) -> np.ndarray:
        self.reads += 1
        return self.values[variable.spec.key]

    def read_many(self, variables) -> list[np.ndarray]:
        return [self.read(variable) for variable in variables]

    async def read_many_async(self, variables) -> list[np.ndarray]:
        return self.read_many(variables)

    def update(self, variable, op, operands, optimizer) -> None:
        assert all(type(operand) is np.ndarray for operand in operands)
        key = variable.spec.key
        if op is UpdateOp.OPERANDS:
            return
        self.updates.append((variable.spec.name, op, operands))
        if op is UpdateOp.OPTIMIZE:
            self._optimize(key, operands[0], optimizer)
        elif op is UpdateOp.OPTIMIZE_ROWS:
            # The same, for rules to which a gradient of zero means nothing.
            zeros = np.zeros_like(self.values[key])
            dense = apply(UpdateOp.SCATTER_ADD, zeros, operands)
            self._optimize(key, dense, optimizer)
        else:
            self.values[key] = apply(op, self.values[key], operands)

    def bind(self, call) -> None:
        """Nothing: here, optimizers move one variable at a time."""

    def read_rows(self, parts) -> list[np.ndarray]:
        self.requests.append([(v.spec.name, indices.tolist()) for v, indices in parts])
        assert all(indices.dtype == np.int64 for _, indices in parts)
        return [self.values[v.spec.key][indices] for v, indices in parts]

    async def read_rows_async(self, parts) -> list[np.ndarray]:
        return self.read_rows(parts)

    def update_many(self, updates) -> None:
        for update in updates:
            self.update(*update)

    async def update_many_async(self, updates) -> None:
        self.update_many(updates)

    async def update_async(self, variable, op, operands, optimizer) -> None:
        self.update(variable, op, operands, optimizer)

    def _optimize(self, key: int, gradient: np.ndarray, optimizer: Optimizer) -> None:
        rule, value = optimizer.transformation, self.values[key]
        slots = self.slots.get((key, optimizer.id), None)
        slots = rule.init(value) if slots is None else slots
        with jax.numpy_dtype_promotion("standard"):  # optax itself needs it
            delta, self.slots[key, optimizer.id] = rule.update(gradient, slots, value)
        self.values[key] = np.asarray(value + delta)


@pytest.fixture
def storage() -> DictStorage:
    return DictStorage()


@pytest.fixture(autouse=True)
def _strict():
    """What the strictest users switch on."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
