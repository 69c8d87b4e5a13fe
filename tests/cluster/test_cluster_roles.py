"""Who saves and who loads, by TensorFlow's rules."""

import pytest

from zstrat.cluster import (
    should_load_checkpoint,
    should_save_checkpoint,
    should_save_summary,
)

FULL = {
    "chief": ["c:1"],
    "worker": ["w0:1", "w1:1"],
    "ps": ["p0:1"],
    "evaluator": ["e:1"],
}
WORKERS = {"worker": ["w0:1", "w1:1"]}


@pytest.mark.parametrize(
    ("cluster", "task", "saves", "loads"),
    [
        (FULL, ("chief", 0), True, True),
        (FULL, ("worker", 0), False, True),
        (FULL, ("evaluator", 0), True, True),
        (FULL, ("ps", 0), False, False),
        (WORKERS, ("worker", 0), True, True),
        (WORKERS, ("worker", 1), False, True),
    ],
)
def test_who_saves_and_loads(cluster, task, saves, loads):
    assert should_save_summary(cluster, *task) is saves
    assert should_save_checkpoint(cluster, *task) is saves
    assert should_load_checkpoint(cluster, *task) is loads


@pytest.mark.parametrize(
    "ask", [should_save_summary, should_save_checkpoint, should_load_checkpoint]
)
def test_a_task_that_cannot_be(ask):
    with pytest.raises(ValueError, match=r"`task_id`.*\b2\b"):
        ask(WORKERS, "worker", 2)
