"""The product on the devices of a machine: on a CPU always, and on its GPUs or TPUs
where it has some that jax can use.

The suite itself leaves accelerators alone (`tests/conftest.py`), so what uses them runs
in processes of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import digits_model as model
import jax
import jax.numpy as jnp
import optax
import pytest
from accelerator_signs import signs

import zstrat as zs

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

HERE = Path(__file__).parent

CPU = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
ACCELERATOR = {
    "JAX_PLATFORMS": "",  # jax chooses
    "XLA_FLAGS": "",  # the suite's are for CPUs, and for compiling fast
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # others may use it, too
    # Else a GPU multiplies float32 with 10 bits of mantissa, and a TPU with 7.
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}


@pytest.fixture(scope="module", params=["cpu", "accelerator"])
def told(request):
    """What a process finds in its environment that is to use these devices; skips where
    this machine has none."""
    if request.param == "cpu":
        return CPU
    found = signs(Path("/dev"), os.environ)
    if not found:
        pytest.skip(
            "needs a GPU or a TPU: there is none in /dev (nvidia0, kfd, accel0, vfio/0)"
        )
    ask = "import jax; print(jax.local_devices()[0].platform)"
    if ran([sys.executable, "-c", ask], ACCELERATOR).stdout.split()[-1:] == ["cpu"]:
        pytest.skip(
            f"needs a jax that can use what is here ({', '.join(found)}), and it sees "
            "the CPU alone: install its plugin, as in pip install 'jax[cuda12]'"
        )
    return ACCELERATOR


def ran(command, environment):
    """The process, when it has ended well."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done


def test_on_the_devices(told):
    file = str(HERE / "on_the_devices.py")
    ran([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file], told)


def test_a_worker_trains_on_its_devices(told):
    """The coordinator is this process, on the CPU; the ps is on the CPU by itself."""
    with (
        zs.LocalCluster(num_ps=1, num_workers=1, env=told) as cluster,
        zs.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            params = {name: zs.Variable(value) for name, value in model.START.items()}
            optimizer = zs.Optimizer(optax.sgd(model.RATE))

        def batches():
            rows = zs.data.Dataset.from_tensor_slices((model.PIXELS, model.LABELS))
            return strategy.experimental_distribute_dataset(
                rows.batch(model.ROWS).repeat()
            )

        def replica(pixels, labels):
            value, gradients = zs.value_and_grad(model.loss)(params, pixels, labels)
            pairs = [(gradients[name], params[name]) for name in params]
            optimizer.apply_gradients(pairs)
            # Decided by the compiler: which kind of device the program is for.
            on_cpu = jax.lax.platform_dependent(
                cpu=lambda: jnp.float32(1), default=lambda: jnp.float32(0)
            )
            return value, on_cpu

        @zs.function
        def step(iterator):
            value, on_cpu = strategy.run(replica, args=next(iterator))
            return (
                strategy.reduce("sum", value, axis=None),
                strategy.reduce("mean", on_cpu, axis=None),
            )

        iterator = iter(coordinator.create_per_worker_dataset(batches))
        told_by = [coordinator.schedule(step, (iterator,)) for _ in range(model.STEPS)]
        coordinator.join()
        losses, on_cpu = zip(*(each.fetch() for each in told_by), strict=True)
        model.same(losses, {name: v.numpy() for name, v in params.items()})
        is_cpu = told is CPU
        assert on_cpu == (is_cpu,) * model.STEPS
        names = strategy.extended.worker_devices
        assert all(name.startswith("/device:CPU:") == is_cpu for name in names)


def test_what_speaks_for_an_accelerator(tmp_path):
    for name in ("null", "nvidiactl", "vfio/vfio", "accel"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert signs(tmp_path, {"TPU_WORKER_HOSTNAMES": "", "TPU_NAME": "mine"}) == []
    for name in ("nvidia10", "kfd", "accel0", "vfio/3"):
        (tmp_path / name).touch()
    found = [f"{tmp_path}/{name}" for name in ("nvidia10", "kfd", "accel0", "vfio/3")]
    assert signs(tmp_path, {"TPU_ACCELERATOR_TYPE": "v4-8"}) == [
        *found,
        "TPU_ACCELERATOR_TYPE",
    ]
