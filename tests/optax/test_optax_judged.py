"""What counts as a difference, and which refusals are good ones."""

import ml_dtypes
import numpy as np
import optax
import pytest
from optax_judged import complaints, leaves_named, named_in, table
from optax_recipes import Case
from optax_reference import difference

GOOD = (
    "optimizer 'Optimizer' couples layer/bias and ['embed']['table'] through "
    "clip_by_global_norm: write the clipping before adam instead"
)


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        (np.float64, 1e-10, 1e-8),
        (np.float32, 5e-6, 5e-5),
        (ml_dtypes.bfloat16, 2.0**-7, 2.0**-6),
    ],
)
def test_leaves_may_differ_by_what_their_dtype_allows(dtype, within, beyond):
    expected = {"w": np.array([1.0, 0.001], dtype)}
    for apart, is_wrong in ((within, False), (beyond, True)):
        got = {"w": np.array([1.0 + apart, 0.001], dtype)}
        assert (difference(expected, got, 3) is not None) is is_wrong


def test_a_difference_tells_where_it_is():
    expected = {"a": np.zeros(2), "layer": {"kernel": np.array([[2.0, 4.0]])}}
    got = {"a": np.zeros(2), "layer": {"kernel": np.array([[2.0, 5.0]])}}
    assert str(difference(expected, got, 7)) == (
        "leaf layer/kernel, step 7: differs by 0.25 of the largest element; "
        "expected 4.0, got 5.0"
    )


@pytest.mark.parametrize(
    "got",
    [
        np.array([1.0, np.nan]),
        np.array([1.0, np.inf]),
        np.array([1.0, 2.0], np.float32),
        np.array([[1.0, 2.0]]),
    ],
)
def test_no_number_no_dtype_and_no_shape_stands_for_another(got):
    found = difference({"w": np.array([1.0, 2.0])}, {"w": got}, 0)
    assert found.largest == np.inf


def test_what_is_not_finite_in_both_is_the_same():
    tree = {"w": np.array([np.nan, np.inf, -np.inf, 1.0])}
    assert difference(tree, tree, 0) is None


def outcome(kind, words="", home="servers, whole", dtype="float64"):
    return {"case": "x", "home": home, "dtype": dtype, "kind": kind, "words": words}


@pytest.mark.parametrize(
    ("fields", "said", "why"),
    [
        ({}, outcome("equal"), None),
        ({}, outcome("wrong", "leaf a"), "wrong: leaf a"),
        ({}, outcome("error", "KeyError: 1"), "error"),
        ({}, outcome("refused", GOOD), None),
        ({}, outcome("refused", GOOD, "Mirrored, in a step"), "nothing is refused"),
        ({}, outcome("refused", "no. Write it otherwise"), "two leaves"),
        ({}, outcome("refused", "layer/bias, embed/table: no"), "what to write"),
        ({}, outcome("refused", "value_fn is a function: use arrays"), None),
        ({"on_servers": "runs"}, outcome("refused", GOOD), "can run it"),
        ({"on_servers": "runs whole"}, outcome("refused", GOOD), "can run it"),
        (
            {"on_servers": "runs whole"},
            outcome("refused", GOOD, "servers, partitioned"),
            None,
        ),
        ({"anywhere": "pairs"}, outcome("refused", "no pairs", "Mirrored"), None),
        ({}, outcome("impossible", "TypeError"), "recipe is wrong"),
        ({}, outcome("impossible", "TypeError", dtype="mixed"), None),
    ],
)
def test_outcomes(fields, said, why):
    case = Case("x", lambda: optax.sgd(0.1), **fields)
    found = complaints([case], [said])
    assert (found == []) if why is None else (why in found[0])


def test_leaves_are_named_in_either_way():
    assert leaves_named(GOOD) == ["embed/table", "layer/bias"]


def test_the_list_has_a_line_for_each_case():
    case = Case("contrib.galore(rank 2)", lambda: optax.sgd(0.1), "contrib.galore")
    said = [
        {**outcome("equal", home="no scope, in a step"), "case": case.name},
        {**outcome("equal"), "case": case.name},
        {
            **outcome("refused", f"ValueError: {GOOD}", "servers, partitioned"),
            "case": case.name,
        },
    ]
    text = table({"contrib.galore": [case]}, said, {case.name}, "0.0")
    assert text.splitlines()[-1].startswith(
        "| `contrib.galore(rank 2)` | whole | values of the step | refused: "
    )
    assert named_in(text) == {"contrib.galore"}
