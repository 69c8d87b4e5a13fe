"""What a worker is at, told while it lasts: a long step is no idle worker."""

from __future__ import annotations

import numpy as np
import pytest
from pipeline_drive import Drive

from zstrat.program import function
from zstrat.worker import Pipeline


async def test_a_step_of_a_minute_is_told_while_it_runs_and_its_rate_afterwards(timed):
    gates = [timed.gate() for _ in range(3)]

    @function(eager=True)
    def step(number):
        gates[number].hold()

    digest = await timed.ship(step)
    for number, gate in enumerate(gates):
        timed.dispatch(digest, [number + 7], timed.arguments(number))
        await gate.wait_reached()
        timed.clock.now += 59.0
        told = timed.worker.telemetry()
        assert told["now"] == {"phase": "compute", "step": number + 7, "seconds": 59.0}
        assert told["time"] == {"compute": 1.0}
        timed.clock.now += 1.0
        gate.open()
        await timed.outcomes([number + 7])
    told = timed.worker.telemetry()
    assert told["now"] == {}
    assert told["rates"]["steps_per_s"] == pytest.approx(1 / 60)


async def test_a_dataset_that_does_not_answer_is_told(timed):
    gate = timed.gate()

    def batches():
        yield np.ones(2, np.float32)  # which tells the layout
        gate.hold()
        yield np.ones(2, np.float32)

    @function
    def step(iterator):
        return next(iterator).sum()

    digest = await timed.ship(step)
    resource, _ = await timed.build(batches)
    timed.dispatch(digest, [6, 7], timed.arguments(timed.it(resource)))
    await gate.wait_reached()
    timed.clock.now += 30.0
    told = timed.worker.telemetry()
    assert told["now"] == {"phase": "draw", "step": 7, "seconds": 30.0}
    assert told["time"] == {"draw": 1.0}
    gate.open()
    assert await timed.outcomes([6, 7]) == [2.0, 2.0]


def test_each_phase_is_seen_from_aside():
    pipeline = Pipeline()
    drive = Drive(pipeline)
    assert pipeline.under_way(0.0) is None
    drive.dispatch([1, 2], reads="weights", writes=True)
    (post,) = drive.rest()
    drive.now += 5.0
    pipeline.rests(drive.now)
    assert pipeline.under_way(0.0) == ("pull", 1, drive.now)
    drive.now += 5.0
    drive.arrive(post)
    assert pipeline.under_way(0.0) == ("compute", 1, drive.now)
    drive.rest()
    drive.now += 5.0
    assert pipeline.under_way(drive.now) is None, "a pull that nobody waits for yet"
