"""What the benchmarks say of themselves."""

from __future__ import annotations

from benchmarks.__main__ import worse_than

REACHED = {"rate": 0.8, "time": 2.0}


def row(name: str, *ratios: float, lower: bool = False) -> dict[str, object]:
    return {"name": name, "ratios": list(ratios), "lower": lower}


def test_what_became_worse_by_more_than_a_tenth_is_told():
    rows = [row("rate", 0.73, 0.1, 0.9), row("time", 2.1, 9.0, 1.0, lower=True)]
    assert worse_than(REACHED, rows) == []
    rows = [row("rate", 0.71, 0.71, 0.9), row("time", 2.3, lower=True)]
    assert worse_than(REACHED, rows) == [
        "rate: 0.71 of the limit, it was 0.8",
        "time: 2.3 of the limit, it was 2",
    ]


def test_a_case_that_nobody_kept_is_told():
    (words,) = worse_than(REACHED, [row("new", 1.0)])
    assert words.startswith("new: nobody kept")
