"""The numbers of replicas where one program is that of all processes, here rows of the
devices of one: no process's own number is written in it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.program.stages import PROCESS, Channel, within_mesh
from zstrat.strategy.replica import AXIS, Team


@pytest.fixture
def within():
    before = within_mesh.set(True)
    yield
    within_mesh.reset(before)


def seen_by_all(team, number):
    """What each device computes of ``number()``, in a program that gathers it."""
    axes = (PROCESS, AXIS)
    devices = np.array(jax.devices()[: team.size]).reshape(-1, team.local)

    def on_each():
        found = jax.lax.all_gather(jnp.asarray(number())[None], axes, tiled=True)
        return found[None, None]

    over = jax.shard_map(
        on_each,
        mesh=jax.sharding.Mesh(devices, axes),
        in_specs=(),
        out_specs=jax.P(*axes),
        check_vma=False,
    )
    return np.asarray(jax.jit(over)())


@pytest.mark.parametrize("local", [1, 2])
def test_it_is_that_of_whoever_runs_the_program(within, local):
    """This is the process of rank 1; the others run what it has traced."""
    team = Team(local, Channel(SimpleNamespace(rank=1, size=3)))
    numbers = list(range(team.size))
    for each in seen_by_all(team, team.replica_id).reshape(-1, team.size):
        assert each.tolist() == numbers
    last = [n - n % local + local - 1 for n in numbers]
    for each in seen_by_all(team, lambda: team.id_of(local - 1)).reshape(-1, team.size):
        assert each.tolist() == last


def test_elsewhere_it_is_this_process_s_own():
    team = Team(1, Channel(SimpleNamespace(rank=1, size=3)))
    assert team.replica_id() == 1
    assert Team(2, Channel(SimpleNamespace(rank=1, size=3))).id_of(1) == 3


def test_a_replica_that_is_alone_needs_no_number_to_merge():
    strategy = zs.OneDeviceStrategy("CPU:3")
    with zs.ReplicaContext(strategy, jnp.int32(0)) as context:
        assert context.merge_call(lambda strategy, x: x + 1, (4,)) == 5
        assert context.devices == strategy.extended.worker_devices
