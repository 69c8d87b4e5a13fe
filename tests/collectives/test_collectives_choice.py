"""The choice of an algorithm: rules, files of rules, and fits to measurements."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.collectives import (
    ALGORITHMS,
    Choices,
    Measurement,
    Rule,
    algorithm_named,
    choices_from,
    fitted,
    read_choices,
)

TABLE = Choices(
    (
        Rule("all_reduce", "direct", ranks=4, nbytes=1000, one_host=True),
        Rule("all_reduce", "tree", nbytes=1000),
        Rule("broadcast", "chain", ranks=2),
    )
)


def test_the_first_rule_that_holds_decides() -> None:
    assert TABLE.choose("all_reduce", 1000, 4, one_host=True) == "direct"
    assert TABLE.choose("all_reduce", 1000, 4, one_host=False) == "tree"
    assert TABLE.choose("all_reduce", 1000, 5, one_host=True) == "tree"
    assert TABLE.choose("broadcast", 5, 2) == "chain"


@given(
    call=st.sampled_from(sorted(ALGORITHMS)),
    nbytes=st.integers(0, 2**40),
    ranks=st.integers(1, 2000),
)
def test_there_is_a_choice_for_every_call(call, nbytes, ranks) -> None:
    for one_host in (False, True):
        name = Choices().choose(call, nbytes, ranks, one_host)
        assert name in ALGORITHMS[call]


def test_a_call_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"'scan'.*all_reduce"):
        Choices().choose("scan", 1, 2)
    with pytest.raises(ValueError, match=r"'scan'.*all_reduce"):
        algorithm_named("scan", "ring")
    with pytest.raises(ValueError, match=r"'chain'.*all_reduce"):
        algorithm_named("all_reduce", "chain")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[rules]]", "nothing but"),
        ("rule = 3", "nothing but"),
        ("rule = [3]", r"\b1\b"),
        ('[[rule]]\ncall = "all_reduce"', r"\b1\b"),
        ('[[rule]]\ncall = "barrier"\nalgorithm = "ring"', r"\b1\b.*'ring'"),
        ('[[rule]]\nranks = "4"', r"\b1\b.*'4'"),
        ("[[rule]]\nbytes = true", r"\b1\b"),
        ("[[rule]]\nbytes = -1", r"\b1\b.*\b1\b.*\b0\b"),
        ("[[rule]]\nchunk = 1", r"\b1\b.*\b1\b"),
    ],
)
def test_what_is_no_table(text, words, tmp_path) -> None:
    with pytest.raises(ValueError, match=words):
        choices_from(tomllib.loads(text))
    path = tmp_path / "algorithms.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"algorithms\.toml"):
        read_choices(path)


def measured(ranks: int, times: dict[int, dict[str, float]]) -> list[Measurement]:
    return [
        Measurement("all_reduce", name, ranks, nbytes, True, seconds)
        for nbytes, by_name in times.items()
        for name, seconds in by_name.items()
    ]


def test_a_fit_takes_what_was_fastest() -> None:
    rows = measured(2, {100: {"tree": 1, "ring": 2}, 10_000: {"tree": 9, "ring": 5}})
    rows += measured(8, {100: {"tree": 3, "ring": 9}, 10_000: {"tree": 7, "ring": 9}})
    assert fitted(rows).rules == (
        Rule("all_reduce", "tree", 4, 1000, True),
        Rule("all_reduce", "ring", 4, None, True),
        Rule("all_reduce", "tree", None, None, True),
    )


def test_a_fit_looks_at_the_median_and_not_at_noise() -> None:
    rows = [
        Measurement("all_reduce", name, 2, 100, False, seconds)
        for name, times in {"tree": [1, 1, 90], "ring": [0.5, 2, 2]}.items()
        for seconds in times
    ]
    rows += [
        Measurement("all_reduce", "tree", 2, 200, False, 1.04),
        Measurement("all_reduce", "ring", 2, 200, False, 1.0),
    ]
    assert fitted(rows).rules == (Rule("all_reduce", "tree", None, None, False),)


def test_a_fit_to_nothing() -> None:
    assert fitted([]) == Choices()
