"""``strategy.run`` where jax traces and no step does: a variable is neither read nor
updated there, as with one replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_replicas import meet

import zstrat as zs

A, S = zs.VariableAggregation, zs.VariableSynchronization


@pytest.fixture(params=[1, 2])
def replicas(request):
    return zs.MirroredStrategy([f"CPU:{n}" for n in range(request.param)])


def created(replicas, **how):
    with replicas.scope():
        return zs.Variable(np.float32(1), **how)


@pytest.mark.parametrize("how", [{}, {"synchronization": S.ON_READ}])
@pytest.mark.parametrize("in_turns", [True, False])
def test_a_value_that_jax_would_keep_is_refused(replicas, how, in_turns):
    variable = created(replicas, name="kept", **how)

    def replica(x):
        if in_turns:
            meet()
        return variable.value() * x

    @jax.jit
    def total(x):
        each = replicas.run(replica, args=(x,))
        return replicas.reduce("sum", each, axis=None)

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'kept'.*jax\.jit"):
            total(1.0)
        replicas.run(lambda: [variable.assign(jnp.float32(2))][1:])  # parts copies


@pytest.mark.parametrize(
    "how",
    [{"aggregation": A.MEAN}, {"aggregation": A.SUM, "synchronization": S.ON_READ}],
)
@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("in_turns", [True, False])
def test_an_update_that_would_happen_once_is_refused(
    replicas, how, is_traced, in_turns
):
    variable = created(replicas, name="moved", **how)
    before = variable.numpy()

    @jax.jit
    def moved(x):
        operand = x if is_traced else jnp.float32(1)

        def replica():
            if in_turns:
                meet()
            variable.assign(operand)

        replicas.run(replica)
        return x

    with pytest.raises(RuntimeError, match=r"'moved'.*jax\.jit"):
        moved(1.0)
    assert variable.numpy() == before


def test_without_variables_it_is_computed(replicas):
    @jax.jit
    def total(x):
        each = replicas.run(lambda x: x * 3, args=(x,))
        return replicas.reduce("sum", each, axis=None)

    assert total(2.0) == 6 * replicas.num_replicas_in_sync
