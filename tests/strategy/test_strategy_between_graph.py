"""Programs that share parameter servers: which part of the data is theirs, and which of
them creates the variables."""

import pytest

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.data import Dataset, InputContext


class Session:
    """Nothing is created here."""

    session = origin = 7
    servers = None

    def close(self):
        pass


def program(cluster, job, index, connect=lambda *_: Session()):
    spec = ClusterSpec({"ps": ["p:1"], **cluster})
    resolver = SimpleClusterResolver(spec, task_type=job, task_id=index)
    return zs.BetweenGraphStrategy(resolver, connect=connect)


def drawn(strategy, dataset):
    """The rows of all replicas of the program."""
    shares = [strategy.experimental_local_results(element) for element in dataset]
    return sorted(row for share in shares for part in share for row in part.tolist())


# The chief comes first, and is counted among those that train (TF's rule); an evaluator
# is not. A sparse cluster is what the program knows of one.
TWO = {"worker": ["w:1", "w:2"]}
CLUSTERS = [
    (TWO, [("worker", 0), ("worker", 1)]),
    (
        {**TWO, "chief": ["c:1"], "evaluator": ["e:1"]},
        [("chief", 0), ("worker", 0), ("worker", 1)],
    ),
    ({"worker": {1: "w:1"}}, [("worker", 1)]),
    ({"chief": ["c:1"], "worker": {3: "w:1"}}, [("chief", 0), ("worker", 3)]),
    ({"worker": {0: "a:1", 2: "b:1"}}, [("worker", 0), ("worker", 2)]),
    ({"worker": {1: "a:1", 2: "b:1"}}, [("worker", 1), ("worker", 2)]),
]


@pytest.mark.parametrize(("cluster", "tasks"), CLUSTERS)
def test_functions_know_their_program(cluster, tasks):
    seen, rows = [], []

    def pipeline(context):
        seen.append(context)
        mine = Dataset.range(12).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return mine.batch(2)

    for task in tasks:
        strategy = program(cluster, *task)
        dataset = strategy.distribute_datasets_from_function(pipeline)
        rows.append(drawn(strategy, dataset))
    replicas, count = strategy.num_replicas_in_sync, len(tasks)
    assert seen == [InputContext(count, n, replicas) for n in range(count)]
    # Dataset.shard gives every n-th element.
    assert rows == [list(range(n, 12, count)) for n in range(count)]


@pytest.mark.parametrize(("cluster", "tasks"), CLUSTERS)
def test_the_first_of_them_creates_the_variables(cluster, tasks):
    asked = []

    def connect(spec, settings, is_chief, index):
        asked.append(is_chief)
        return Session()

    for task in tasks:
        extended = program(cluster, *task, connect).extended
        assert extended.should_checkpoint == extended.should_save_summary == asked[-1]
    assert asked == [True] + [False] * (len(tasks) - 1)


def test_a_dataset_is_whole_in_every_program():
    for task in (0, 1):
        strategy = program(TWO, "worker", task)
        batches = Dataset.range(8).batch(4)
        dataset = strategy.experimental_distribute_dataset(batches)
        assert drawn(strategy, dataset) == list(range(8))
