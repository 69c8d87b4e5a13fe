"""Programs that share parameter servers know which part of the data is theirs."""

import pytest

from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.data import Dataset, InputContext
from zstrat.strategy import BetweenGraphStrategy

PS = ["127.0.0.1:9000"]
WORKERS = {"ps": PS, "worker": ["127.0.0.1:9001", "127.0.0.1:9002"]}
WITH_CHIEF = {**WORKERS, "chief": ["127.0.0.1:9003"], "evaluator": ["127.0.0.1:9004"]}


class Session:
    """Nothing is created here."""

    session = origin = 7
    servers = None

    def close(self):
        pass


def program(spec, job, task):
    resolver = SimpleClusterResolver(ClusterSpec(spec), task_type=job, task_id=task)
    return BetweenGraphStrategy(resolver, connect=lambda *_: Session())


def drawn(strategy, dataset):
    """The rows of all replicas of the program."""
    shares = [strategy.experimental_local_results(element) for element in dataset]
    return sorted(row for share in shares for part in share for row in part.tolist())


@pytest.mark.parametrize(
    ("spec", "tasks"),
    [
        (WORKERS, [("worker", 0), ("worker", 1)]),
        (WITH_CHIEF, [("chief", 0), ("worker", 0), ("worker", 1)]),
    ],
)
def test_functions_know_their_program(spec, tasks):
    seen, rows = [], []
    for job, task in tasks:
        strategy = program(spec, job, task)

        def pipeline(context):
            seen.append(context)
            return (
                Dataset.range(12)
                .shard(context.num_input_pipelines, context.input_pipeline_id)
                .batch(2)
            )

        dataset = strategy.distribute_datasets_from_function(pipeline)
        rows.append(drawn(strategy, dataset))
    replicas = strategy.num_replicas_in_sync
    count = len(tasks)
    # The chief comes first, and is counted among those that train (TF's rule); an
    # evaluator is not.
    assert seen == [InputContext(count, n, replicas) for n in range(count)]
    # Dataset.shard gives every n-th element.
    assert rows == [list(range(n, 12, count)) for n in range(count)]


def test_a_dataset_is_whole_in_every_program():
    for task in (0, 1):
        strategy = program(WORKERS, "worker", task)
        batches = Dataset.range(8).batch(4)
        dataset = strategy.experimental_distribute_dataset(batches)
        assert drawn(strategy, dataset) == list(range(8))
