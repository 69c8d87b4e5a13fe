"""TF's names of devices: of this process, whatever task it is, and of a worker's."""

import jax
import pytest

from zstrat.strategy._devices import task_names


def test_devices_of_a_task():
    (here, *_) = jax.local_devices()
    assert task_names([here]) == ("/job:localhost/replica:0/task:0/device:CPU:0",)
    assert task_names([here], "worker", 3) == (
        "/job:worker/replica:0/task:3/device:CPU:0",
    )


@pytest.mark.parametrize(
    ("platform", "kind"),
    [("cpu", "CPU"), ("gpu", "GPU"), ("cuda", "GPU"), ("rocm", "GPU"), ("tpu", "TPU")],
)
def test_devices_of_a_worker_by_jaxs_word_for_their_kind(make_cluster, platform, kind):
    cluster = make_cluster(devices=2)
    cluster.session.platform = platform
    strategy = type(cluster.strategy)(
        cluster.resolver, connect=lambda spec, settings: cluster.session
    )
    assert strategy.extended.worker_devices == (
        f"/device:{kind}:0",
        f"/device:{kind}:1",
    )
