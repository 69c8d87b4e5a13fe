"""Values that a step is still making when it fails, as where nothing waits for it: who
assigns one has it again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs


def failing(like):
    """An array whose computation has failed."""

    def fail(x):
        raise OSError("the disk is broken")

    def program(x):
        return jax.pure_callback(fail, x, x)

    mapped = jax.shard_map(
        program,
        mesh=like.sharding.mesh,
        in_specs=like.sharding.spec,
        out_specs=like.sharding.spec,
        check_vma=False,
    )
    made = jax.jit(mapped)(jnp.zeros(like.shape, like.dtype))
    with pytest.raises(Exception, match="the disk is broken"):
        made.block_until_ready()
    return made


@pytest.mark.parametrize("is_apart", [True, False])
def test_an_assignment_brings_the_value_back(two, is_apart, capfd):
    options = (
        {"synchronization": zs.VariableSynchronization.ON_READ} if is_apart else {}
    )
    with two.scope():
        variable = zs.Variable(
            np.ones(3, np.float32), aggregation=zs.VariableAggregation.MEAN, **options
        )
    variable.storage.take_over(failing(variable.storage.value()))
    with pytest.raises(Exception, match="the disk is broken"):
        variable.numpy()
    variable.assign(np.full(3, 5, np.float32))
    assert list(variable.numpy()) == [5, 5, 5]
    variable.assign_add(np.ones(3, np.float32))
    assert list(variable.numpy()) == [6, 6, 6]
    capfd.readouterr()  # XLA's own words


def test_slots_begin_anew_with_it(two, capfd):
    with two.scope():
        variable = zs.Variable(np.zeros(3, np.float32))
        optimizer = zs.Optimizer(optax.sgd(1.0, momentum=0.5))

    @zs.function
    def step():
        two.run(lambda: optimizer.apply_gradients([(jnp.ones(3) / 2, variable)]))

    step()
    storage = variable.storage
    rule = optimizer.slot_rule(variable)
    storage.take_over_slots(
        rule, [failing(leaf) for leaf in storage.slots_before(rule)]
    )
    storage.take_over(failing(storage.value()))
    variable.assign(np.zeros(3, np.float32))
    step()
    step()
    # The second step moves by 1 + 0.5.
    np.testing.assert_allclose(variable.numpy(), -2.5, rtol=1e-6)
    capfd.readouterr()


def test_an_assignment_to_a_copy_brings_it_back(two, capfd):
    with two.scope():
        variable = zs.Variable(np.ones(3, np.float32))
    two.run(lambda: variable.assign(jnp.full(3, 2.0)))
    variable.storage.take_over(failing(variable.storage.value()))
    for n, copy in enumerate(two.experimental_local_results(variable)):
        copy.assign(np.full(3, n, np.float32))
    for n, copy in enumerate(two.experimental_local_results(variable)):
        np.testing.assert_array_equal(copy.numpy(), np.full(3, n))
    capfd.readouterr()
