"""A calibration measures every algorithm, and its table can be used."""

from __future__ import annotations

import pytest

from zstrat.collectives import ALGORITHMS, fitted
from zstrat.launch import Calibration, calibrate
from zstrat.transport import run

CHOICES = {call for call, algorithms in ALGORITHMS.items() if len(algorithms) > 1}


def test_groups_double_up_to_the_largest():
    assert Calibration(2).groups == [2]
    assert Calibration(4).groups == [2, 4]
    assert Calibration(7).groups == [2, 4, 7]


@pytest.mark.parametrize("wrong", [{"ranks": 1}, {"sizes": ()}, {"sizes": (0,)}])
def test_what_cannot_be_measured(wrong):
    with pytest.raises(ValueError, match="expected"):
        Calibration(**wrong)


def test_every_algorithm_is_measured_on_every_size():
    begun: list[int] = []
    plan = Calibration(3, (4, 5000), "ipc")
    found = run(calibrate(plan, begun.append))
    assert begun == [2, 3]
    assert {(m.call, m.algorithm, m.ranks, m.nbytes) for m in found} == {
        (call, algorithm, ranks, nbytes)
        for call in CHOICES
        for algorithm in ALGORITHMS[call]
        for ranks in (2, 3)
        for nbytes in (4, 5000)
    }
    assert all(m.one_host and m.seconds > 0 for m in found)
    assert {rule.call for rule in fitted(found).rules} == CHOICES
