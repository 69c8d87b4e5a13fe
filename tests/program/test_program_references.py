"""References by name, to objects in files that workers have, too."""

from __future__ import annotations

import importlib
import re
import sys

import jax
import numpy as np
import pytest

import zstrat.program as zs

SOURCE = """
import threading, jax
LOCKS = {"one": [threading.Lock()]}
FACTOR = 3
class Point:
    def __init__(self, x):
        self.x = x
jax.tree_util.register_pytree_node(
    Point, lambda p: ((p.x,), None), lambda _, c: Point(*c)
)
def locked(x):
    with LOCKS["one"][0]:
        return FACTOR * x
def plain(x):
    return FACTOR * x
"""


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A module in a file of the user's, and its path."""
    path = tmp_path / "zs_beside.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("zs_beside")
    yield module, path
    sys.modules.pop("zs_beside", None)


def test_a_lock_goes_by_name_and_what_uses_it_by_value(beside):
    module, _ = beside
    module.FACTOR = 5  # a worker's import does not know that
    fn = zs.load(zs.dump_code(module.locked))
    assert fn is not module.locked
    assert fn(2) == 10
    assert fn.__globals__["LOCKS"] is module.LOCKS


def test_a_pytree_class_registered_by_functions_goes_by_name(beside):
    module, _ = beside
    tree = {"at": module.Point(np.float32(4))}
    (got,) = zs.load(*zs.dump((tree,)))
    assert type(got["at"]) is module.Point
    assert jax.tree.leaves(got) == [4.0]


def test_a_missing_or_other_source_is_an_error_that_names_module_and_place(beside):
    module, path = beside
    code, tree = zs.dump_code(module), zs.dump(([module.Point(1)], 2))
    del sys.modules["zs_beside"]
    path.write_text(SOURCE + "\n")
    words = (
        rf"zs_beside\.LOCKS cannot be shipped.*{re.escape(str(path))}.*another source"
    )
    shipped = zs.load(code)
    assert shipped.plain(2) == 6  # what does not need it is not kept from it
    with pytest.raises(ImportError, match=words):
        shipped.locked(2)
    path.unlink()
    importlib.invalidate_caches()
    words = r"'zs_beside'.*PYTHONPATH"
    with pytest.raises(ImportError, match=words):
        zs.load(code).locked(2)
    for use in (shipped.Point, lambda x: isinstance(x, shipped.Point)):
        with pytest.raises(ImportError, match=r"zs_beside\.Point"):
            use(2)
    with pytest.raises(ImportError, match=r"zs_beside\.Point"):
        zs.load(*tree)


def test_flags_of_absl_are_read_before_the_step():
    flags = pytest.importorskip("absl.flags")
    own = flags.FlagValues()
    holder = flags.DEFINE_float("zstrat_rate", 0.1, "a rate", flag_values=own)
    for body in (lambda: own.zstrat_rate, lambda: holder.value):
        with pytest.raises(TypeError, match=r"FLAGS\.rate"):
            zs.dump_code(zs.function(body))
