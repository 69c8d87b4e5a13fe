"""Programs that know only some workers: each reads its share of what it knows, and one
of them creates the variables."""

import jax
import pytest

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.data import Dataset


class Session:
    session = origin = 7
    servers = None

    def close(self):
        pass


@pytest.mark.parametrize(
    ("cluster", "index", "share"),
    [
        ({"worker": {1: "w:1"}}, 1, range(12)),
        ({"chief": ["c:1"], "worker": {3: "w:1"}}, 3, range(1, 12, 2)),
        ({"worker": {0: "a:1", 2: "b:1"}}, 2, range(1, 12, 2)),
    ],
)
def test_its_input_pipeline_is_one_of_those_that_it_knows(cluster, index, share):
    strategy = zs.BetweenGraphStrategy(
        SimpleClusterResolver(
            ClusterSpec({"ps": ["p:1"], **cluster}), task_type="worker", task_id=index
        ),
        devices=jax.local_devices()[:1],
        connect=lambda *_: Session(),
    )

    def dataset_fn(context):
        everything = Dataset.range(12)
        return everything.shard(context.num_input_pipelines, context.input_pipeline_id)

    made = strategy.distribute_datasets_from_function(dataset_fn)
    assert [int(row) for row in made] == list(share)


@pytest.mark.parametrize(
    ("cluster", "first"),
    [
        ({"worker": {1: "a:1", 2: "b:1"}}, ("worker", 1)),
        ({"chief": ["c:1"], "worker": {0: "a:1", 2: "b:1"}}, ("chief", 0)),
        ({"worker": {0: "a:1", 2: "b:1"}}, ("worker", 0)),
    ],
)
def test_one_of_them_creates_the_variables(cluster, first):
    asked = []

    def connect(spec, settings, is_chief, index):
        asked.append(is_chief)
        return Session()

    tasks = [("chief", 0)] if "chief" in cluster else []
    tasks += [("worker", index) for index in cluster["worker"]]
    for job, index in tasks:
        strategy = zs.BetweenGraphStrategy(
            SimpleClusterResolver(
                ClusterSpec({"ps": ["p:1"], **cluster}), task_type=job, task_id=index
            ),
            devices=jax.local_devices()[:1],
            connect=connect,
        )
        extended = strategy.extended
        assert extended.should_checkpoint == extended.should_save_summary == asked[-1]
    assert asked == [task == first for task in tasks]
