"""Processes that draw from files of their own come to one end, over a real group."""

import json
import sys
from pathlib import Path

import numpy as np

from zstrat.launch import Copies, run_copies
from zstrat.transport import run

TASK = Path(__file__).parent / "dataset_task.py"


def test_processes_draw_and_end_together(tmp_path):
    for number, rows in enumerate([range(6), range(6, 8)]):
        np.save(tmp_path / f"{number}.npy", np.array(rows, np.int32))
    lines = []
    command = (sys.executable, str(TASK), str(tmp_path))
    assert run(run_copies(Copies(command, 2), lines.append)) == 0, lines
    found = [{}, {}]
    for line in lines:
        name, _, text = line.partition(" | ")
        found[int(name[-1])] = json.loads(text)
    assert [each["AUTO"] for each in found] == [
        [[0, 1], [2, 3], [4, 5]],  # file 0
        [[6, 7], [], []],  # file 1
    ]
    assert [each["DATA"] for each in found] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [each["OFF"] for each in found] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ] * 2
    # Rows 0 1 and 2 of one, 0 1, 2 3 and 4 of the other.
    assert [each["sums"] for each in found] == [[2, 7, 4]] * 2
