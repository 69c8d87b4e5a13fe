"""Trials of shipped objects: errors name the path to a part that would not arrive.

Annotations are no strings here, because equinox reads them.
"""

import sys
import types
from typing import Any

import equinox as eqx
import numpy as np
import pytest

import zstrat.program as zs


def test_code_of_an_installed_metaclass_runs_once_more_for_all_trials(monkeypatch):
    made = []

    class Counting(type):
        def __init__(cls, *args):
            made.append(cls)

    installed = types.ModuleType("counting")
    installed.__file__ = "/usr/lib/python3/site-packages/counting.py"
    installed.Counting = Counting
    Counting.__module__, Counting.__qualname__ = "counting", "Counting"
    monkeypatch.setitem(sys.modules, "counting", installed)

    class Model(metaclass=Counting):
        pass

    for _ in range(3):
        zs.dump_code(lambda: Model)
        zs.dump((Model(),))
    assert len(made) == 2
    assert zs.load(zs.dump_code(Model)) is Model
    assert len(made) == 2


def test_errors_name_the_path_to_a_part_that_cannot_be_loaded():
    class Lost:
        def __reduce__(self):
            return zs.digest, (3,)

    holds = {"deep": [1, Lost()]}
    words = r"captured name 'holds' -> item 'deep' -> item 1 is a .*Lost, which cannot "
    with pytest.raises(TypeError, match=words + "arrive"):
        zs.dump_code(lambda: holds)


def test_a_statement_that_cannot_run_again_is_filled_into_a_blank_class():
    class Words(eqx.Enumeration):  # its metaclass takes the items out of the class
        first = "one"

    class Lost(eqx.Module):
        x: Any

        def __reduce__(self):
            return zs.digest, (3,)

    model = [Lost(1)]
    with pytest.raises(TypeError, match=r"\b0\b.*Lost"):
        zs.dump_code(lambda: model)
    code = zs.dump_code(lambda: (Words[Words.first], Lost(2).x))
    assert zs.load(code)() == ("one", 2)
    assert b"_make_skeleton_class" in code
    assert b"_make_skeleton_class" not in zs.dump_code(lambda: Lost)


def test_errors_name_the_path_to_a_part_that_becomes_another_pytree():
    class Half(eqx.Module):
        x: Any
        y: Any

        def __getstate__(self):
            return {"x": self.x, "y": None}

    model = {"halves": [Half(np.ones(2), np.ones(3))]}
    words = r"'model'.*'halves'.*\b0\b"
    with pytest.raises(TypeError, match=words):
        zs.dump_code(lambda: model)
