"""What each of several processes says of itself: its devices, and whether it saves."""

import re

import pytest
from ranks import Board, Threads, ranks

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver


def test_each_rank_names_its_own_task():
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(1.0)
        assert strategy.extended.parameter_devices[0] == v.device
        assert strategy.extended.non_slot_devices([v]) == v.device
        assert strategy.extended.worker_devices == (v.device,)
        return v.device

    assert ranks(2, program) == [
        f"/job:worker/replica:0/task:{rank}/device:CPU:0" for rank in range(2)
    ]


def made(cluster, job, index):
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type=job, task_id=index)
    return zs.MultiWorkerMirroredStrategy(
        resolver, group=lambda *_: Threads(Board(1), 0)
    )


def duties(*task):
    """Whether the task saves checkpoints, and whether it saves summaries."""
    extended = made(*task).extended
    return extended.should_checkpoint, extended.should_save_summary


@pytest.mark.parametrize(
    "cluster",
    [
        {"worker": {1: "a:1", 2: "b:1"}},
        {"worker": {0: "a:1", 2: "b:1"}},
        {"worker": {4: "a:1"}},
        {"chief": ["c:1"], "worker": {0: "a:1", 3: "b:1"}},
        {"chief": ["c:1"]},
    ],
)
def test_the_first_one_that_is_there_saves_alone_and_an_evaluator(cluster):
    tasks = [("chief", 0)] if "chief" in cluster else []
    tasks += [("worker", index) for index in sorted(cluster.get("worker", ()))]
    found = [duties(cluster, *task) for task in tasks]
    assert found == [(True, True)] + [(False, False)] * (len(tasks) - 1)
    everybody = {**cluster, "evaluator": ["e:1"]}
    assert duties(everybody, "evaluator", 0) == (True, True)


@pytest.mark.parametrize("task", [(None, None), ("worker", None), (None, 0)])
def test_a_process_knows_which_task_it_is(task):
    words = (
        "When `cluster_spec` is not empty, both `task_type` and `task_id` must be "
        "specified."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        made({"worker": ["127.0.0.1:9000", "127.0.0.1:9001"]}, *task)


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
