"""The cases that `make test` tries, of many that `make test-thorough` tries all."""

import itertools

import hypothesis
import pytest


def combined(*values, step=0):
    """All combinations of values, for ``parametrize``. `make test` tries each
    ``step``-th: so that each value is tried, with several others one after another."""
    step, rows = step or min(map(len, values)), []
    for places in itertools.product(*[range(len(each)) for each in values]):
        row = [each[place] for each, place in zip(values, places, strict=True)]
        marks = [pytest.mark.thorough] if sum(places) % step else []
        rows.append(pytest.param(*row, marks=marks))
    return rows


def examples(most, **options):
    """The settings of a property that `make test-thorough` tries with so many examples,
    instead of 100. `make test` tries the first ones of them."""
    share = hypothesis.settings().max_examples / 100
    return hypothesis.settings(max_examples=max(1, round(most * share)), **options)
