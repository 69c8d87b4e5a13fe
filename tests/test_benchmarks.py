"""What the benchmarks say of themselves."""

from __future__ import annotations

from benchmarks.__main__ import worse_than

REACHED = {"rate": [0.8, 0.75], "time": [2.0, 2.15], "noisy": [0.8, 0.5]}


def row(name: str, *ratios: float, lower: bool = False) -> dict[str, object]:
    return {"name": name, "ratios": list(ratios), "lower": lower}


def test_what_became_worse_by_more_than_a_tenth_is_told():
    rows = [row("rate", 0.73, 0.1, 0.9), row("time", 2.1, 9.0, 1.0, lower=True)]
    assert worse_than(REACHED, rows) == []
    rows = [row("rate", 0.71, 0.71, 0.9), row("time", 2.3, lower=True)]
    assert worse_than(REACHED, rows) == [
        "rate: 0.71 of the limit, it was 0.8 (0.75 at worst)",
        "time: 2.3 of the limit, it was 2 (2.15 at worst)",
    ]


def test_what_lies_within_the_runs_that_were_kept_is_not_worse():
    assert worse_than(REACHED, [row("noisy", 0.55, 0.5, 0.9)]) == []
    assert len(worse_than(REACHED, [row("noisy", 0.45)])) == 1


def test_a_case_that_nobody_kept_is_told():
    (words,) = worse_than(REACHED, [row("new", 1.0)])
    assert words.startswith("new: nobody kept")
