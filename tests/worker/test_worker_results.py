"""Results that the program could not be told of: refused before they have an effect."""

from __future__ import annotations

import numpy as np
import pytest

from zstrat.errors import ClosureInputError
from zstrat.program import function


def nested(levels):
    tree = np.float32(1)
    for _ in range(levels):
        tree = {"below": tree}
    return tree


UNTOLD = {
    "too many parts": lambda: list(range(60_000)),
    "too long a text": lambda: "x" * 300_000,
    "too many arrays": lambda: [np.zeros(3, np.float32)] * 9000,
    "too deep": lambda: nested(40),
    "deeper than Python goes": lambda: nested(5000),
}


@pytest.mark.parametrize(
    ("what", "eager"),
    [(what, True) for what in UNTOLD]
    # XLA takes long to compile a program with 9,000 results.
    + [(what, False) for what in UNTOLD if what != "too many arrays"],
)
async def test_a_result_that_cannot_be_told_is_the_steps_error_and_has_no_effect(
    world, what, eager
):
    v = world.variable(np.float32(0))
    made = UNTOLD[what]

    @function(eager=eager)
    def step():
        if not eager:
            v.assign_add(1.0)
        return made()

    error = await world.once(step)
    assert isinstance(error, ValueError)
    assert "the step returns a" in str(error)
    assert "return" in str(error).split(": ", 1)[1].lower()  # what to do
    assert world.value(v) == 0
    # The session goes on, and layouts are numbered as if there had been none.
    (fine,) = await world.run(await world.ship(function(lambda: nested(25))), [2])
    assert fine == nested(25)


async def test_elements_that_cannot_be_told_are_the_datasets_error(world):
    for made in (nested(40), {f"k{n}": np.float32(n) for n in range(30_000)}):
        with pytest.raises(ValueError, match="the dataset has elements that cannot be"):
            await world.build(lambda made=made: iter([made]), resource=70)

        @function
        def step(iterator):
            next(iterator)

        digest = await world.ship(step)
        (error,) = await world.run(digest, [1], world.arguments(world.it(70)))
        assert isinstance(error, ClosureInputError)


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, [("a", "i4")]), np.zeros(2, np.longdouble)],
    ids=["records", "long"],
)
async def test_a_dtype_that_does_not_travel_is_named_by_the_step(world, array):
    @function(eager=True)
    def step():
        return {"made": array}

    error = await world.once(step)
    assert isinstance(error, TypeError)
    assert f"dtype {array.dtype} at result['made']" in str(error)
    assert "float32" in str(error)
