"""What a run tells of itself goes to writers, and training never hears of them."""

from __future__ import annotations

import logging
import math
import struct
import threading

import pytest
from strikes import is_struck

import zstrat as zs

SUMMARY = {"count": 4, "mean": 1.0, "p50": 0.5, "p90": 0.75, "p99": 2.0, "max": 3.0}


class Told:
    """A coordinator that tells these, one after the other, and then the last."""

    def __init__(self, *metrics):
        self._left = list(metrics)
        self.asked = threading.Semaphore(0)

    def metrics(self):
        self.asked.release()
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


class Written:
    def __init__(self, fails=0):
        self.points, self.is_closed, self._fails = [], False, fails

    def write(self, step, values, about):
        if self._fails:
            self._fails -= 1
            raise OSError(28, "No space left on device")
        self.points.append((step, values))

    def close(self):
        self.is_closed = True


def told(points, **more):
    return {"scalars": {"loss": points}, **more}


def losses(written):
    return [(step, v["loss"]) for step, v in written.points if "loss" in v]


def test_each_point_is_written_once():
    first = told([[0, 0.5, 2.0], [1, 0.75, None]])
    second = told([[1, 0.75, None], [5, 1.0, 0.25]])
    written, coordinator = Written(), Told(first, second)
    with zs.MetricsExport(coordinator, [written], every=0.01):
        for _ in range(4):
            assert coordinator.asked.acquire(timeout=60)
    assert written.is_closed
    found = losses(written)
    assert [step for step, _ in found] == [0, 1, 5]
    assert (found[0][1], math.isnan(found[1][1]), found[2][1]) == (2.0, True, 0.25)


def test_what_the_run_tells_is_at_the_steps_that_are_done():
    metrics = told(
        [],
        scheduled_closures=100,
        queued_closures=7,
        inflight_closures=3,
        steps_per_s=12.5,
        examples_per_s=None,
        staleness=SUMMARY,
        phases={"pull": SUMMARY, "draw": {**SUMMARY, "count": 0}},
    )
    written = Written()
    zs.MetricsExport(Told(metrics), [written], every=1e6).close()
    assert written.points == [
        (
            90,
            {
                "run/steps_per_s": 12.5,
                "run/staleness/p50": 0.5,
                "run/staleness/p99": 2.0,
                "run/pull_s/p50": 0.5,
                "run/pull_s/p99": 2.0,
            },
        )
    ]


def test_a_full_disk_costs_points_and_is_said_once(caplog):
    full, fine = Written(fails=3), Written()
    coordinator = Told(*(told([[n, float(n), 1.0]]) for n in range(5)))
    with zs.MetricsExport(coordinator, [full, fine], every=0.01):
        for _ in range(5):
            assert coordinator.asked.acquire(timeout=60)
    assert [step for step, _ in losses(fine)] == [0, 1, 2, 3, 4]
    assert [step for step, _ in losses(full)] == [3, 4]
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert [each.getMessage() for each in errors] == ["Written: points are lost"]


def test_tensorboard_reads_them(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    points = told([[3, 0.5, 0.25], [4, 0.75, 0.125]])
    events = zs.TensorBoardEvents(tmp_path / "tb")
    zs.MetricsExport(Told(points), [events], every=1e6).close()
    (file,) = (tmp_path / "tb").iterdir()
    left, found = file.read_bytes(), []
    while left:  # a record: its length, a checksum, itself, a checksum
        (length,) = struct.unpack("<Q", left[:8])
        event, left = Event.FromString(left[12 : 12 + length]), left[16 + length :]
        found += [
            (event.step, each.tag, each.simple_value) for each in event.summary.value
        ]
    assert found == [(3, "loss", 0.25), (4, "loss", 0.125)]


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan])
def test_every_is_a_time(wrong):
    with pytest.raises(ValueError, match="expected seconds, above 0"):
        zs.MetricsExport(Told({}), [], every=wrong)


def test_ctrl_c_anywhere_in_a_close_loses_no_point():
    files = "/saving/_evaluator.py", "/zstrat/threads.py", "/threading.py"
    for number in range(1, 20):
        written = Written()
        export = zs.MetricsExport(Told(told([[0, 0.5, 2.0]])), [written], every=1e6)
        is_struck(export.close, number, *files)
        closing = threading.Thread(target=export.close, daemon=True)
        closing.start()
        closing.join(100)
        assert not closing.is_alive(), number
        assert written.is_closed
        assert losses(written) == [(0, 2.0)]
