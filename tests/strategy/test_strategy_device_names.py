"""TF's names of devices: of this process, whatever task it is, and of a worker's."""

import pytest
from ranks import ranks

import zstrat as zs


def test_devices_of_a_task():
    here = zs.OneDeviceStrategy("CPU:0").extended
    assert here.worker_devices == ("/job:localhost/replica:0/task:0/device:CPU:0",)
    assert ranks(2, lambda strategy, rank: strategy.extended.worker_devices) == [
        (f"/job:worker/replica:0/task:{rank}/device:CPU:0",) for rank in range(2)
    ]


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
