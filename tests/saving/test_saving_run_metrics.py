"""Curves of a run, written for whoever draws them."""

import pytest

import zstrat as zs


class Run:
    """What a coordinator says, one answer after the other; the last one again."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def metrics(self):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Written:
    def __init__(self, fails_at=None):
        self.calls, self.is_closed, self.fails_at = [], False, fails_at

    def write(self, step, values, about):
        assert about["time"] > 0
        if len(self.calls) == self.fails_at:
            raise OSError(28, "No space left on device")
        self.calls.append((step, dict(values)))

    def close(self):
        self.is_closed = True


def summary(count, p50=0.0, p99=0.0):
    return {"count": count, "mean": 0.0, "p50": p50, "p90": 0.0, "p99": p99, "max": 0.0}


METRICS = {
    "low_water": 41,
    "steps_per_s": 12.5,
    "examples_per_s": None,
    "queued_closures": 7,
    "phases": {"pull": summary(3, 0.25, 0.5), "draw": summary(0)},
    "staleness": summary(2, 1.0, 4.0),
    "tasks": {
        "worker:0": {"state": "open", "steps_per_s": 12.5, "memory": 1000},
        "ps:0": {"state": "open", "busy": 0.25, "bytes_in_per_s": float("nan")},
    },
    "scalars": {"loss": [[1, 0.5, 2.0], [2, 0.75, None], [3, 1.0, 1.5]]},
}
NUMBERS = {
    "run/steps_per_s": 12.5,
    "run/queued_closures": 7.0,
    "phases/pull_p50": 0.25,
    "phases/pull_p99": 0.5,
    "staleness/p50": 1.0,
    "staleness/p99": 4.0,
    "worker:0/steps_per_s": 12.5,
    "worker:0/memory": 1000.0,
    "ps:0/busy": 0.25,
}


def test_what_is_known_is_written_at_its_step_when_the_block_ends():
    writer = Written()
    with zs.write_metrics(Run(METRICS), writer, every=1e6):
        assert writer.calls == []
    assert writer.calls == [(1, {"loss": 2.0}), (3, {"loss": 1.5}), (41, NUMBERS)]
    assert writer.is_closed


def test_it_is_written_again_and_again_and_each_point_once():
    later = {
        **METRICS,
        "low_water": 42,
        "scalars": {"loss": [[3, 1.0, 1.5], [4, 2, 1]]},
    }
    writer = Written()
    run = Run(METRICS, later, later)
    with zs.write_metrics(run, writer, every=0.001):
        while len(run.answers) > 1:
            pass  # the thread is at it
    steps = [step for step, values in writer.calls if "loss" in values]
    assert steps == [1, 3, 4]
    assert [s for s, v in writer.calls if "loss" not in v][:2] == [41, 42]


def test_a_full_disk_ends_the_curves_and_nothing_else(caplog):
    writer = Written(fails_at=1)
    with zs.write_metrics(Run(METRICS), writer, every=1e6):
        trained = True
    assert trained
    assert writer.calls == [(1, {"loss": 2.0})]
    assert "not written any more: OSError: [Errno 28] No space left" in caplog.text


@pytest.mark.parametrize("every", [0, -1.0, float("inf")])
def test_it_takes_some_time_between_two(every):
    with pytest.raises(ValueError, match="seconds above 0"):
        zs.write_metrics(Run(METRICS), Written(), every=every)
